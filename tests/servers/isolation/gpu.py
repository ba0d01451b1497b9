"""Writes a fake `torch` that reports a GPU or none.

It has only the calls that a replica makes before its entrypoint runs.
"""

from __future__ import annotations

from pathlib import Path

TORCH = """
from types import SimpleNamespace

__version__ = "2.13.0"
version = SimpleNamespace(cuda={cuda!r}, hip=None)
cuda = SimpleNamespace(is_available=lambda: {sees_gpu}, manual_seed_all=lambda number: None, device_count=lambda: 1)
default_generator = SimpleNamespace(manual_seed=lambda number: None)
def set_num_threads(number): ...
"""


def write_torch(folder: Path, *, sees_gpu: bool, cuda: str | None = "13.0") -> Path:
    """Write the fake `torch` into a folder, and return the folder.

    Put it before the installed packages on `sys.path`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "torch.py").write_text(TORCH.format(sees_gpu=sees_gpu, cuda=cuda))
    return folder
