"""The entrypoints of replicas in the tests of restarts in the same process."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

from executors import Replica, current_replica, restartable
from executors.store.records import exists
from executors.testing import eventually
from support.processes import PROC
from support.restart_tasks import end_by

CALLS: list[str] = []
"""The calls in this process so far."""


class Model:
    """Stands for a model of torch. Like such a model, it is part of a cycle of references."""

    def __init__(self) -> None:
        self.me = self


MODELS: list[weakref.ref[Any]] = []


def initialize(replica: Replica) -> None:
    CALLS.append(f"initialize {replica.attempt}")


def finalize(replica: Replica) -> None:
    CALLS.append(f"finalize {replica.attempt}")


def check(replica: Replica) -> None:
    CALLS.append(f"check {replica.attempt}")


def _end(kind: str) -> None:
    if kind == "wait":
        time.sleep(3600)
    elif kind == "thread":
        threading.Thread(target=time.sleep, args=(3600,), daemon=True, name="left behind").start()
        raise ValueError("boom")
    else:
        end_by(kind)


@restartable(initialize=initialize, finalize=finalize, health_check=check)
def end_in_turn(kinds: list[str]) -> dict[str, Any]:
    """End attempt k in the way `kinds[k]`. The attempt after these returns the state that it finds."""
    me, model = current_replica(), Model()
    living = sum(each() is not None for each in MODELS)
    MODELS.append(weakref.ref(model))
    CALLS.append(f"call {me.attempt}")
    print(f"attempt {me.attempt}", flush=True)
    assert me.page is not None
    assert os.environ["REPLICA_ATTEMPT"] == str(me.attempt)
    me.report(step=me.attempt + 1)
    if me.attempt < len(kinds):
        _end(kinds[me.attempt])
    return {"pid": os.getpid(), "calls": CALLS, "living": living, "before": me.previous_failure}


def _refuse(replica: Replica) -> bool:
    return False


@restartable(health_check=_refuse)
def fail_unfit() -> int:
    if current_replica().attempt == 0:
        raise ValueError("boom")
    return os.getpid()


def _lose(replica: Replica) -> None:
    raise RuntimeError("cannot be closed")


@restartable(finalize=_lose)
def fail_to_finalize() -> int:
    return fail_unfit()


@restartable()
def fail_to_release() -> int:
    """As a DiLoCo whose last merge fails."""

    def merge() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    if current_replica().attempt == 0:
        current_replica().at_failure.append(merge)
    return fail_unfit()


@restartable()
def lose_the_gpu() -> int:
    """As if the failed call had left an error of CUDA after which every further call fails. No memory is cached."""
    import torch

    def synchronize(device: int) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    if current_replica().attempt == 0:
        cuda: Any = torch.cuda
        cuda.is_initialized, cuda.device_count, cuda.synchronize = (lambda: True), (lambda: 1), synchronize
        cuda.memory_reserved = lambda device: 1 << 20
    return fail_unfit()


@restartable()
def break_the_gpu() -> int:
    """Leave an error of CUDA after which every further call fails."""
    import torch

    if current_replica().attempt == 0:
        torch.zeros(3, device="cuda")[torch.tensor([7], device="cuda")] = 1.0
    return fail_unfit()


def _fail_first(replica: Replica) -> None:
    if replica.attempt == 0:
        raise ValueError("not ready")


@restartable(initialize=_fail_first)
def fail_to_initialize() -> int:
    return os.getpid()


@restartable()
def fail_without_progress() -> None:
    raise ValueError("boom")


@restartable()
def fail_often(n: int) -> dict[str, Any]:
    """Fail in n attempts. Return the memory and the descriptors of this process at some of them."""
    me = current_replica()
    block = bytearray(1 << 22)
    me.report(step=me.attempt + 1, size=len(block))
    me.progress(kept=True)
    if me.attempt % 10 == 0 or me.attempt == n:
        pages = int((PROC / "self/statm").read_text().split()[1])
        MEASURED.append((pages >> 8, len(os.listdir(PROC / "self/fd")), len(os.listdir(PROC / "self/task"))))
    if me.attempt < n:
        raise ValueError("boom")
    return {"measured": [list(each) for each in MEASURED], "pid": os.getpid()}


MEASURED: list[tuple[int, int, int]] = []


@restartable()
def tell_times() -> list[float]:
    """Fail 20 times. Return the seconds from each failure to the next call."""
    me = current_replica()
    TIMES.append(time.monotonic())
    me.report(step=me.attempt + 1)
    me.progress(kept=True)
    if me.attempt < 20:
        raise ValueError("boom")
    return [after - before for before, after in itertools.pairwise(TIMES)]


TIMES: list[float] = []


@restartable()
def hang_when_told(n: int) -> dict[str, Any]:
    """Hang in n attempts, and return in the next one."""
    me, model = current_replica(), Model()
    living = sum(each() is not None for each in MODELS)
    MODELS.append(weakref.ref(model))
    me.report(step=me.attempt + 1)
    if me.attempt < n:
        while True:
            time.sleep(0.1)
    return {"pid": os.getpid(), "living": living, "before": me.previous_failure}


@restartable()
def fail_three_times() -> int:
    if current_replica().attempt < 3:
        # The words differ. A difference in digits alone would count as the same error, which is not tried again.
        raise ValueError(("first", "second", "third")[current_replica().attempt])
    return os.getpid()


@restartable()
def train_while_the_other_waits(
    total_steps: int, fails_at: list[int], options: dict[str, Any], *, in_block: bool = False
) -> dict[str, Any]:
    """Train with the other replica. Rank 1 fails in each attempt but the last, while rank 0 waits in the round.

    Args:
        total_steps: the steps of the run.
        fails_at: by attempt, the step of the run at which rank 1 fails.
        options: more arguments of `DiLoCo`.
        in_block: True: the DiLoCo is opened in a `with` block.
    """
    import contextlib

    import torch

    from diloco import DiLoCo

    me = current_replica()
    torch.manual_seed(me.rank)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    diloco = DiLoCo(model, inner_steps=4, total_steps=total_steps, **options)
    diloco.attach_state("optimizer", optimizer)
    begins_at, reports = diloco.inner_step, []
    with diloco if in_block else contextlib.nullcontext():
        for _ in diloco.steps():
            if me.rank == 1 and me.attempt < len(fails_at) and diloco.inner_step == fails_at[me.attempt]:
                sent = f"{me.run_id}/diloco/main/r{diloco.rounds}/contribution/0"
                eventually(partial(exists, me.store, sent), "rank 0 has sent its work and waits for the round")
                raise ValueError(f"boom at {diloco.inner_step}")
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if (report := diloco.step()) is not None:
                reports.append([report.round, list(report.ranks)])
    diloco.close()
    anchor = {name: float(value.sum()).hex() for name, value in diloco.anchor().items()}
    return {"pid": os.getpid(), "reports": reports, "anchor": anchor, "begins_at": begins_at}


@restartable()
def train_again(folder: str, total_steps: int, fails_at: list[int], options: dict[str, Any]) -> dict[str, Any]:
    """Train with the other replica. Rank 1 fails in each attempt but the last, in the middle of a round.

    Rank 0 waits in the same round until rank 1 trains again.
    """
    import torch

    from diloco import DiLoCo

    me = current_replica()
    living = sum(each() is not None for each in MODELS)
    torch.manual_seed(me.rank)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    MODELS.append(weakref.ref(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    diloco = DiLoCo(model, inner_steps=4, total_steps=total_steps, **options)
    diloco.attach_state("optimizer", optimizer)
    reports = []
    Path(folder, f"{me.rank}.{me.attempt}").touch()
    for _ in diloco.steps():
        if me.rank == 0 and diloco.inner_step in fails_at:
            eventually(Path(folder, f"1.{fails_at.index(diloco.inner_step) + 1}").exists)
        if me.rank == 1 and me.attempt < len(fails_at) and diloco.inner_step == fails_at[me.attempt]:
            raise ValueError(f"boom at {diloco.inner_step}")
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if (report := diloco.step()) is not None:
            reports.append([report.round, list(report.ranks)])
    diloco.close()
    anchor = {name: float(value.sum()).hex() for name, value in diloco.anchor().items()}
    return {"pid": os.getpid(), "living": living, "reports": reports, "anchor": anchor}
