"""The entrypoints of replicas in the tests of restarts."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from executors import current_replica
from executors.store.records import exists
from executors.testing import eventually
from support import tasks
from support.hanging import HANGS
from support.processes import is_alive


def end_by(kind: str, group: str = "") -> None:
    """End this process in one of many ways."""
    if kind == "exit":
        os._exit(3)
    elif kind == "sys.exit":
        sys.exit(True)
    elif kind == "exception":
        raise ValueError("boom")
    elif kind == "memory":
        tasks.take_memory(group)
    elif kind == "helper":
        helper = subprocess.Popen([sys.executable, "-c", tasks.SLEEP])
        helper.kill()
        helper.wait()
    elif kind == "hang":
        tasks.hang()
    elif kind != "return":
        os.kill(os.getpid(), signal.Signals[kind])


def end_first(kinds: list[str], group: str) -> int:
    """End the first attempt of each rank in the way `kinds[rank]`, and return in the second attempt."""
    me = current_replica()
    print(f"attempt {me.attempt} of rank {me.rank}", flush=True)
    if me.attempt == 0:
        end_by(kinds[me.rank], group)
    return me.attempt


def tell_previous_failure(kinds: list[str]) -> str | None:
    """End attempt k in the way `kinds[k]`. The attempt after these returns the previous failure."""
    me = current_replica()
    if me.attempt < len(kinds):
        end_by(kinds[me.attempt])
    return me.previous_failure


def end_always(kinds: list[str]) -> None:
    end_by(kinds[current_replica().rank])


def die_and_hang(folder: str, fails: int = 0) -> None:
    """Kill one rank's first attempt when all ranks have started. All other attempts hang."""
    me = current_replica()
    tasks.mark(Path(folder, f"{me.rank}.{me.attempt}"), str(os.getpid()))
    if (me.rank, me.attempt) == (fails, 0):
        eventually(lambda: len(list(Path(folder).glob("*.0"))) == me.world_size)
        os.kill(os.getpid(), signal.SIGKILL)
    tasks.hang()


def die_when_told(folder: str) -> None:
    """Kill the first attempt of rank 0 when the file `die` exists.

    All other attempts return when the file `return` exists.
    """
    me = current_replica()
    tasks.mark(Path(folder, f"{me.rank}.{me.attempt}"))
    dies = (me.rank, me.attempt) == (0, 0)
    eventually(Path(folder, "die" if dies else "return").exists, within_s=120)
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)


def leave_when_asked(folder: str) -> str:
    tasks.mark(Path(folder, "called"))
    eventually(lambda: current_replica().ending_s is not None, "the replica was asked to leave")
    return "saved"


def bomb(folder: str) -> int:
    """Start 200 child processes in many sessions, all of which ignore SIGTERM, and then die."""
    me = current_replica()
    if me.attempt == 1:
        return sum(is_alive(int(path.name)) for path in Path(folder).glob("[0-9]*"))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for number in range(100):
        if os.fork() == 0:
            if number % 2:
                os.setsid()
            is_orphan = os.fork() == 0
            tasks.mark(Path(folder, str(os.getpid())))
            if is_orphan or number % 3:
                time.sleep(600)
            os._exit(0)
    eventually(lambda: len(list(Path(folder).glob("[0-9]*"))) == 200)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still here")


def hang_first(kinds: list[str]) -> int:
    """Make progress once. The first attempt of a rank then hangs in the way `kinds[rank]`, and the second returns."""
    me = current_replica()
    me.progress()
    if me.attempt:
        return me.attempt
    HANGS[kinds[me.rank]]()
    raise AssertionError("still here")


def save_slowly(folder: str) -> None:
    """Spend five times the grace of a cancel in an atomic block, and then hang."""
    me = current_replica()
    with me.atomic():
        tasks.mark(Path(folder, "begun"))
        eventually(lambda: exists(me.store, me.key("cancel.json")))
        time.sleep(2.5)
        tasks.mark(Path(folder, "saved"))
    tasks.mark(Path(folder, "went on"))
    tasks.hang()


def come_back_when_resumed(folder: str) -> int:
    """Rank 0 leaves twice, so that it is given up.

    After a resume it is killed, and then returns. Rank 1 waits for that return.
    """
    me = current_replica()
    if me.rank == 0 and me.attempt < 2:
        os._exit(3)
    if me.rank == 0 and me.attempt == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if me.rank == 0:
        tasks.mark(Path(folder, "done"))
    eventually(Path(folder, "done").exists)
    return me.attempt


def never_leave(fails: list[int]) -> int:
    """Return or raise, and then wait at exit, in the first attempt."""
    me = current_replica()
    if me.attempt == 0:
        atexit.register(tasks.hang)
    if me.attempt == 0 and me.rank in fails:
        raise ValueError("boom")
    return me.attempt


def let_another_run_out_of_memory(group: str) -> None:
    """Wait until the kernel has killed a helper that used too much memory, and then be killed by another process."""
    helper = os.fork()
    if helper == 0:
        tasks.take_memory(group)
    os.waitpid(helper, 0)
    os.kill(os.getpid(), signal.SIGKILL)


def use_the_loss_after_the_loop(has_own_loop: bool) -> list[float]:
    """Train for four rounds, and then use a variable of the loop, as scripts do. Return the weights."""
    import torch

    from diloco import DiLoCo

    model = torch.nn.Linear(2, 1, bias=False)
    with DiLoCo(model, inner_steps=2, total_steps=8, outer_lr=1.0, outer_momentum=0.0) as diloco:
        for _ in range(diloco.inner_step, 8) if has_own_loop else diloco.steps():
            loss = model.weight.detach().sum() + current_replica().rank
            with torch.no_grad():
                model.weight.add_(loss)
            diloco.step()
    assert loss.isfinite()
    return [float(value) for value in model.weight.detach().flatten()]
