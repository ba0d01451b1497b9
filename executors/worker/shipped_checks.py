"""The health checks that ship. Each tests one part of this machine, and returns or raises what it found, by value."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import itertools
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from executors.errors import ReplicasError, StoreError
from executors.module_search import new_python
from executors.replica import Replica
from executors.store.url import directory_of

SIZE = 1024
"""The rows and columns of the matrices. Their product is an integer that every GPU computes exactly."""
LEAST_FREE = 0.1
"""The share of a GPU's memory that must be free."""
LEAST_DISK_BYTES = 1 << 30
PROBE_BYTES = 4 << 20
MOST_SKEW_S = 60.0
"""The decision log believes no time that is further ahead; see `executors.restarts.decision_log`."""
SMI_LIMIT_S = 10.0
SMI_FIELDS = (
    *("index", "name", "temperature.gpu", "ecc.errors.uncorrected.volatile.total"),
    *("clocks_throttle_reasons.hw_thermal_slowdown", "clocks_throttle_reasons.hw_power_brake_slowdown"),
)
FOUND_PROBLEM = 3
"""The exit code of a child process that found a problem."""
UNKNOWN = ("", "[N/A]", "N/A", "[Not Supported]", "[Unknown Error]")


class FoundProblem(ReplicasError):
    """A health check found a problem. The text has the value."""


def run_check(
    name: str, replica: Replica, gpu: str | None, *, is_one_of_all: bool = False, in_child: bool = False
) -> str:
    """Run one check, and return a sentence about what it found.

    Args:
        name: the check.
        replica: this replica.
        gpu: the GPU that the launch requests. None: no GPU.
        is_one_of_all: True if the user asked for all checks. Then a machine without a GPU is in order, unless the
            launch requests a GPU. Default False.
        in_child: True if this process only waits for a command. Then a child process asks the GPUs, because this
            process would keep GPU memory until the command ends. Default False.

    Raises:
        FoundProblem: the check failed.
        StoreError: the store does not answer.
    """
    if name == "gpu":
        is_optional = is_one_of_all and gpu is None
        return _check_gpus_in_child(is_optional) if in_child else _check_gpus(is_optional)
    checks: Mapping[str, Callable[[Replica], str]] = {"disk": check_disk, "store": check_store, "clock": check_clock}
    return checks[name](replica)


def _check_gpus(is_optional: bool) -> str:
    if is_optional and _why_no_gpu() is not None:
        return "skipped, because the launch requests no GPU and this machine shows none"
    return check_devices(_devices())


def _check_gpus_in_child(is_optional: bool) -> str:
    command = new_python(f"from {__name__} import main; main()", *["optional"] * is_optional)
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
    *_, found = ["", *ended.stdout.splitlines()]  # an import may print lines before
    if ended.returncode == FOUND_PROBLEM:
        raise FoundProblem(found)
    if ended.returncode:
        raise FoundProblem(f"the process that asks the GPUs ended with {ended.returncode}")
    return found


def main() -> None:
    """Check the GPUs in a child process: print what was found, and exit with `FOUND_PROBLEM` if it is a problem."""
    try:
        print(_check_gpus("optional" in sys.argv[1:]))
    except FoundProblem as problem:
        print(problem)
        sys.exit(FOUND_PROBLEM)


def _why_no_gpu() -> str | None:
    """Return the reason why PyTorch can use no GPU. None: it can use one."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = "" if visible is None else f", CUDA_VISIBLE_DEVICES={visible!r}"
        return f"PyTorch {torch.__version__} finds none (CUDA {torch.version.cuda or 'is not built in'}{shown})"
    return None


def _devices() -> Sequence[int]:
    """Return the GPUs of this process: its own in a replica of several processes, otherwise all visible ones.

    Raises:
        FoundProblem: there is none.
    """
    if (reason := _why_no_gpu()) is not None:
        raise FoundProblem(f"no GPU can be used: {reason}")
    n = importlib.import_module("torch").cuda.device_count()
    own = os.environ.get("LOCAL_RANK", "")
    return [int(own)] if own.isdecimal() and int(own) < n else range(n)


def check_devices(devices: Sequence[int], device_type: str = "cuda") -> str:
    """Multiply matrices on GPUs, compare with the known product, and look at memory, ECC errors and throttling.

    Args:
        devices: the numbers of the GPUs.
        device_type: the kind of the devices. Default "cuda". Tests use "cpu".

    Raises:
        FoundProblem: a product is wrong, memory is short, or a GPU reports errors or throttling.
    """
    torch = importlib.import_module("torch")
    rows = torch.arange(SIZE)
    # Products of integers below 3 and their sums below 2^24 are exact in every format of a tensor core.
    left = ((rows[:, None] + 2 * rows[None, :]) % 5 - 2).float()
    right = ((3 * rows[:, None] + rows[None, :]) % 3 - 1).float()
    expected = left @ right
    found = []
    for number in devices:
        device = device_type if device_type == "cpu" else f"{device_type}:{number}"
        _synchronize(torch, device)
        began = time.monotonic()
        product = left.to(device) @ right.to(device)
        _synchronize(torch, device)
        took_s = time.monotonic() - began
        wrong = int((product.cpu() != expected).sum())
        if wrong:
            raise FoundProblem(f"GPU {number} computed {wrong} of {SIZE * SIZE} values of a matrix product wrongly")
        memory = ""
        if device_type == "cuda":
            free, total = torch.cuda.mem_get_info(number)
            memory = f", {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
            if free < LEAST_FREE * total:
                raise FoundProblem(
                    f"GPU {number} has {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, less than "
                    f"{LEAST_FREE:.0%}. Another process uses it"
                )
        found.append(f"GPU {number}: a product of {SIZE} x {SIZE} is right in {took_s:.2f} s{memory}")
    reported = _ask_nvidia_smi() if device_type == "cuda" else None
    found.append(reported or "nvidia-smi is not available: ECC errors and throttling are not known")
    return "; ".join(found)


def _synchronize(torch: Any, device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _ask_nvidia_smi() -> str | None:
    """Return a sentence on ECC errors and throttling. None: nvidia-smi is missing or does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command += [] if not visible else [f"--id={visible}"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=SMI_LIMIT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return None if told.returncode else judge_smi(told.stdout)


def judge_smi(text: str) -> str:
    """Return a sentence about the output of nvidia-smi.

    Args:
        text: the lines, with the values of `SMI_FIELDS`.

    Raises:
        FoundProblem: a GPU has errors in memory that ECC cannot correct, or is throttled because of heat or power.

    Example:
        judge_smi("0, NVIDIA H100, 35, 0, Not Active, Not Active")
    """
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != len(SMI_FIELDS):
            continue
        number, name, celsius, errors, thermal, brake = (value.strip() for value in row)
        if errors not in (*UNKNOWN, "0"):
            raise FoundProblem(f"GPU {number} ({name}) has {errors} memory errors that ECC cannot correct")
        for words, state in (("heat", thermal), ("its power supply", brake)):
            if state == "Active":
                raise FoundProblem(f"GPU {number} ({name}) is throttled because of {words}, at {celsius} °C")
        ecc = "ECC is not reported" if errors in UNKNOWN else "0 ECC errors"
        found.append(f"{name} at {celsius} °C, {ecc}, not throttled")
    return "; ".join(found) or "nvidia-smi lists no GPU"


def check_disk(replica: Replica) -> str:
    """Look for free space in the folders to which this process writes.

    Args:
        replica: this replica.

    Raises:
        FoundProblem: a folder has too little space, or no file can be written there.
    """
    folders = {"the current folder": os.getcwd(), "the temporary folder": tempfile.gettempdir()}
    if (directory := directory_of(replica.store.url)) is not None:
        folders["the store"] = str(directory)
    found = []
    for name, folder in folders.items():
        try:
            usage = shutil.disk_usage(folder)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"\0" * 4096)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if name == "the current folder":  # code is often mounted read-only
                continue
            raise FoundProblem(f"no file can be written to {name} {folder!r}: {error.strerror}") from error
        words = f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB are free in {name} {folder!r}"
        if usage.free < LEAST_DISK_BYTES:
            raise FoundProblem(f"{words}, less than {LEAST_DISK_BYTES / 1e9:.1f} GB")
        found.append(words)
    return "; ".join(found)


def check_store(replica: Replica) -> str:
    """Write, read and delete an object of 4 MiB.

    Args:
        replica: this replica.

    Raises:
        FoundProblem: other bytes were read than were written.
        StoreError: the store does not answer.
    """
    store, key, data = replica.store, _probe_key(replica), os.urandom(PROBE_BYTES)
    times = [time.monotonic()]
    try:
        store.put(key, data)
        times.append(time.monotonic())
        is_same = bytes(store.get(key)) == data
        times.append(time.monotonic())
    finally:
        store.delete(key)
    times.append(time.monotonic())
    if not is_same:
        raise FoundProblem(f"{store.url} returned other bytes than were written")
    write_s, read_s, delete_s = (after - before for before, after in itertools.pairwise(times))
    return f"4 MiB were written in {write_s:.2f} s, read in {read_s:.2f} s and deleted in {delete_s:.2f} s"


def check_clock(replica: Replica) -> str:
    """Compare the clock of this machine with the clock of the store.

    Args:
        replica: this replica.

    Raises:
        FoundProblem: the clocks differ by more than a minute.
        StoreError: the store does not answer.
    """
    store, key = replica.store, _probe_key(replica)
    before = time.time()
    try:
        store.put(key, b"clock")
        after = time.time()
        modified = next((entry.modified_at for entry in store.list(key) if entry.key == key), None)
    finally:
        store.delete(key)
    if modified is None:
        raise StoreError(f"{key!r} was written to {store.url} and is not listed.", key=key, url=store.url)
    # The store noted its time between both moments, perhaps in whole seconds.
    skew_s = max(before - modified - 1.0, modified - after, 0.0)
    direction = "behind" if modified > after else "ahead of"
    if skew_s > MOST_SKEW_S:
        raise FoundProblem(
            f"the clock of this machine is {skew_s:.0f} s {direction} the clock of the store, more than "
            f"{MOST_SKEW_S:.0f} s. Set it by NTP"
        )
    return f"the clock differs from the clock of the store by {skew_s:.1f} s"


def _probe_key(replica: Replica) -> str:
    return replica.key(f"health-{secrets.token_hex(8)}")
