"""What `replicas doctor` shows of a machine, and with `--probe` of a replica."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from executors.process import usable_cores

DRIVER = "/proc/driver/nvidia/version"
PACKAGES = ("torch", "numpy", "boto3", "modal", "huggingface_hub")


def describe_environment() -> dict[str, str]:
    """Return the facts about where this process runs: system, Python, packages, cores, GPUs."""
    cores = usable_cores() if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_version()} at {sys.executable}",
        "packages": ", ".join(map(_version, PACKAGES)),
        "cores": str(cores),
        "gpus": _gpus(),
    }


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver; None where there is none."""
    with contextlib.suppress(OSError):
        if found := re.search(r"\b\d+\.\d[\d.]*", Path(DRIVER).read_text()):
            return found.group()
    listed = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    return listed[0] if listed else None


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"no {package}"


def _gpus() -> str:
    names = [line.partition(" (UUID")[0] for line in _nvidia_smi("--list-gpus")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (", ".join(names) or "none") + ("" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})")


def _nvidia_smi(*arguments: str) -> list[str]:
    try:
        command = ["nvidia-smi", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
