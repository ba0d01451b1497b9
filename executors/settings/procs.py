"""The setting `procs`: how many processes, called members, each replica has."""

from __future__ import annotations

from typing import Any

MAX_PROCS = 1024
BY_GPU, BY_GPU_OR_ONE = "gpu", "auto"
TAKES = f"procs (--procs) must be a number from 1 to {MAX_PROCS}, 'gpu' or 'auto'"


def procs_text(value: Any) -> str:
    """Return the number of processes of each replica as text, in the form that records contain.

    Args:
        value: a number from 1 to 1024, the same as a text, "gpu" or "auto".

    Raises:
        TypeError: the value is neither an integer nor a text.
        ValueError: the number is out of range, or the text is not one of these words.

    Example:
        procs_text(2)  # "2"
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{TAKES}, got {value!r}.")
    text = str(value)
    is_number = text.isascii() and text.isdecimal() and len(text) <= 4
    if text in (BY_GPU, BY_GPU_OR_ONE) or (is_number and 1 <= int(text) <= MAX_PROCS):
        return text if not is_number else str(int(text))
    raise ValueError(f"{TAKES}, got {value!r}.")


def known_procs(procs: str | None, gpu: str | None) -> int | None:
    """Return the number of processes of each replica. None: it is counted where a replica starts.

    Args:
        procs: the setting. None: 1.
        gpu: the GPU of each replica, as in "H100:8". None: no GPU.

    Example:
        known_procs("gpu", "H100:8")  # 8
    """
    if procs is None:
        return 1
    return int(procs) if procs.isdecimal() else gpus_asked(gpu)


def gpus_asked(gpu: str | None) -> int | None:
    """Return the number of GPUs that a launch requests for each replica. None: the launch gives no number.

    Args:
        gpu: the GPU of each replica, as in "H100:8". None: no GPU.

    Example:
        gpus_asked("H100:8")  # 8
    """
    count = (gpu or "").rpartition(":")[2]
    return int(count) if gpu is not None and ":" in gpu and count.isdecimal() and int(count) > 0 else None
