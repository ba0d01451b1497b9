"""Collects facts about a machine for `replicas doctor`, and about a replica for `replicas doctor --probe`."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import re
import subprocess
import sys
import time
from importlib import metadata

from executors.process import NVIDIA_DRIVER_FILE, gpu_of_system, usable_cores
from executors.replica import BOOTSTRAP_S

PACKAGES = ("torch", "numpy", "boto3", "modal", "huggingface_hub", "kubernetes")


def describe_environment() -> dict[str, str]:
    """Return the facts about this machine: system, Python, packages, cores and GPUs, by their names."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_version()} at {sys.executable}",
        "packages": ", ".join(map(_version, PACKAGES)),
        "cores": str(usable_cores()),
        "gpus": _gpus(),
    }


def probe(gpu: str | None = None) -> dict[str, str]:
    """Return the facts about a replica, by their names.

    Args:
        gpu: the GPU that the launch requests. If it is given, the facts on torch and its import are included. None,
            the default: they are left out.
    """
    facts = describe_environment()
    print("probed", flush=True)  # `doctor` checks that the log of the replica has this line
    if gpu is None:
        return facts
    began = time.monotonic()
    torch = importlib.import_module("torch")
    imported_s = time.monotonic() - began
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        **facts,
        "driver": driver_version() or "none",
        "torch": f"{torch.__version__}, built for CUDA {torch.version.cuda or '(none)'}, sees {seen} GPUs",
        "fetching and installing": f"{float(os.environ.get(BOOTSTRAP_S) or 0.0):.1f} s",
        "importing torch": f"{imported_s:.1f} s",
    }


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver. None: no driver was found."""
    with contextlib.suppress(OSError):
        if found := re.search(r"\b\d+\.\d[\d.]*", NVIDIA_DRIVER_FILE.read_text()):
            return found.group()
    listed = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    return listed[0] if listed else None


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"no {package}"


def _gpus() -> str:
    names = [line.partition(" (UUID")[0] for line in nvidia_smi("--list-gpus")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (", ".join(names) or gpu_of_system() or "none") + (
        "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    )


def nvidia_smi(*arguments: str) -> list[str]:
    """Return the lines that `nvidia-smi` prints. The list is empty if the command fails.

    Args:
        arguments: the arguments of the command.
    """
    try:
        command = ["nvidia-smi", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
