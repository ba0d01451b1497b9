"""What `replicas doctor` shows of a machine, and with `--probe` of a replica."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata

PACKAGES = ("torch", "numpy", "boto3", "modal", "huggingface_hub")


def describe_environment() -> dict[str, str]:
    """Return the facts about where this process runs: system, Python, packages, cores, GPUs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_version()} at {sys.executable}",
        "packages": ", ".join(map(_version, PACKAGES)),
        "cores": str(cores),
        "gpus": _gpus(),
    }


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"no {package}"


def _gpus() -> str:
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "none"
    names = [line.partition(" (UUID")[0] for line in listed.stdout.splitlines()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (", ".join(names) or "none") + ("" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})")
