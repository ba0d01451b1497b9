"""Prepares a process for its entrypoint: environment variables, threads, the GPU, and seeds of random numbers."""

from __future__ import annotations

import hashlib
import importlib
import os
import random
import sys
import time
from collections.abc import Iterable, Mapping

from executors import replica as environment
from executors.errors import ReplicasError
from executors.replica import Replica, set_current_replica
from executors.task.placeholders import NAMES, fill

GPU_RELEASE_S, GPU_PAUSE_S = 50.0, 0.5
OTHER_FRAMEWORKS = ("jax", "tensorflow")
EARLY_WARNINGS: list[str] = []
"""The warnings that this process gave before its replica had claimed an attempt."""


_GIVEN: dict[str, str] = {}
"""The user's variables with their placeholders, which the next attempt of the same process replaces again."""


class NoGpuError(ReplicasError):
    """The launch requests a GPU, and torch cannot use one in this process."""

    outcome_reason = "start_failed"


def set_environment(replica: Replica, threads: int | None = None) -> None:
    """Set the environment variables of the replica, for this process and its children.

    Args:
        replica: the replica.
        threads: the number of threads for torch and OpenMP, unless the user has set `OMP_NUM_THREADS`. None, the
            default: nothing is set.
    """
    environment.leave_process_group()
    contract = (replica.rank, replica.world_size, replica.run_id, replica.attempt, replica.rendezvous)
    os.environ.update(zip(environment.CONTRACT, map(str, contract), strict=True))
    set_current_replica(replica)
    if threads is not None:
        n_threads = os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        if "torch" in sys.modules and n_threads.isdigit():  # torch has read the variable before this process set it
            sys.modules["torch"].set_num_threads(int(n_threads))


class OwnValues(dict[str, object]):
    """A replica's own values for placeholders, by name. It records which of them were used.

    Args:
        values: the values.
    """

    def __init__(self, values: Mapping[str, object]) -> None:
        super().__init__(values)
        self.used: set[str] = set()
        """The names of the placeholders that were replaced so far."""

    def __getitem__(self, name: str) -> object:
        self.used.add(name)
        return super().__getitem__(name)


def fill_in_environment(replica: Replica, given: Iterable[str]) -> OwnValues:
    """Replace the placeholders in environment variables. Return the values of all placeholders.

    Args:
        replica: the replica whose values replace the placeholders.
        given: the names of the variables that the user gave.
    """
    own = OwnValues({name: getattr(replica, name) for name in NAMES})
    for name in given:
        if name in os.environ:
            os.environ[name] = fill(_GIVEN.setdefault(name, os.environ[name]), own)
    return own


def check_gpu(asked: str) -> None:
    """Check that torch can use a GPU, so that no replica trains on the CPU of a machine with a paid GPU.

    Nothing is checked if torch is not installed, or if the entrypoint has loaded another framework and not torch.

    Args:
        asked: the GPU that the launch asked for, for the message.

    Raises:
        NoGpuError: torch cannot use a GPU. The message has the driver and the build of torch.
    """
    if "torch" not in sys.modules and any(name in sys.modules for name in OTHER_FRAMEWORKS):
        return
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError):  # an entrypoint that needs torch raises this error itself
        return
    if torch.cuda.is_available():
        return
    from executors.worker.probe import driver_version

    driver = driver_version()
    build = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is a build without CUDA"
    if driver is None:
        advice = "No NVIDIA driver was found: is this a machine with a GPU?"
    elif torch.version.cuda is None:
        advice = f"The NVIDIA driver is {driver}. Require a torch that is built for CUDA."
    else:
        advice = (
            f"The NVIDIA driver is {driver}: if that is too old for this CUDA, require an older torch or choose an "
            "image with one."
        )
    if "diloco" not in sys.modules:
        advice += (
            f" If this trains with {' or '.join(OTHER_FRAMEWORKS)}, import that at the top of the entrypoint's file."
        )
    raise NoGpuError(f"gpu={asked!r} was asked for, and torch sees no GPU: torch {torch.__version__} {build}. {advice}")


def await_gpu_release(pid: int, limit_s: float = GPU_RELEASE_S) -> None:
    """Wait until an ended process has freed its GPU memory, which takes a moment.

    Args:
        pid: the process.
        limit_s: the longest wait in seconds. Default 50. After it, a warning is printed, and the replica starts.
    """
    from executors.worker.probe import nvidia_smi

    began, has_printed = time.monotonic(), False
    while str(pid) in nvidia_smi("--query-compute-apps=pid", "--format=csv,noheader"):
        if not has_printed:
            _print(f"waiting until process {pid}, which has ended, is gone from the GPU")
            has_printed = True
        if time.monotonic() - began > limit_s:
            still = f"process {pid} is still on the GPU after {limit_s:g} s; starting all the same"
            _print(still)
            EARLY_WARNINGS.append(f"{still}.")
            return
        time.sleep(GPU_PAUSE_S)


def _print(words: str) -> None:
    print(f"replicas: {words}.", file=sys.stderr, flush=True)


def seed_generators(replica: Replica, seed: int | None, but: set[str]) -> set[str]:
    """Seed the loaded random generators of Python, numpy and torch, each rank with its own stream.

    Args:
        replica: the replica.
        seed: the seed of the run. None: the id of the run is the seed.
        but: generators that were seeded before. They are not seeded again, because the user's module may have seeded
            them since.

    Returns: the names of all loaded generators.
    """
    of_member = f"/{replica.member}" if replica.member else ""
    source = f"{replica.run_id if seed is None else seed}/{replica.rank}{of_member}"
    loaded: set[str] = {name for name in ("random", "numpy", "torch") if name in sys.modules}
    fresh = loaded - but
    if "random" in fresh:
        random.seed(source)
    if fresh <= {"random"}:
        return loaded
    number = int.from_bytes(hashlib.sha256(source.encode()).digest()[:8], "big") >> 1
    if "numpy" in fresh:
        sys.modules["numpy"].random.seed(number % 2**32)
    if "torch" in fresh:
        torch = sys.modules["torch"]
        torch.default_generator.manual_seed(number)  # torch.manual_seed takes 3 ms on a build without accelerators
        if torch.version.cuda or torch.version.hip:
            torch.cuda.manual_seed_all(number)
        mps = getattr(getattr(torch, "backends", None), "mps", None)  # the GPU of a Mac
        if mps is not None and mps.is_available():
            torch.mps.manual_seed(number)
    return loaded
