"""What every replica runs, on every backend: claim the attempt, call the entrypoint, leave one outcome.

`main()` owns its process: a forked child locally, `python -m executors.worker` elsewhere. `call()` does the same
inside a stranger's process, and so touches neither its descriptors nor its signals.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import hashlib
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from executors import replica as environment
from executors.attempt_records import Claim
from executors.endings import TERMINATED, outcome_of_error, outcome_of_termination, outcome_of_timeout, outcome_of_value
from executors.errors import ReplicasError, StoreError
from executors.heartbeat import Heartbeat
from executors.insisting import insist
from executors.outcome import Outcome, insist_on_outcome
from executors.process import children, flush_c_streams, kill_descendants, start_time
from executors.protocol import ReplicaStatus
from executors.records import exists, read_record, to_bytes
from executors.replica import Replica, replica_key, set_current_replica
from executors.run_record import RunRecord
from executors.store import Store, store_at
from executors.store.opening import split_address
from executors.task import StoredTask, read_task

if TYPE_CHECKING:
    from executors.deadline import Deadline


@dataclass(frozen=True)
class Assignment:
    """What a replica's process is told by whoever started it."""

    store_url: str
    run_id: str
    rank: int
    world_size: int
    attempt: int
    """The attempt asked for; the replica claims this one or the next that is free."""
    task_digest: str | None = None
    task: StoredTask | None = None
    """The task, if whoever started the process read it already."""
    supervisor_pid: int | None = None
    """This process's parent, which watches over it and with which it ends. None: nobody does."""
    output_tail: Callable[[], str] | None = None
    """Returns the end of the output, for the outcome."""
    term_grace_s: float = 5.0
    torch_threads: int | None = None
    timeout_s: float | None = None
    """The time limit, where this process has to end itself."""
    spent_s: float = 0.0
    """How much of the limit was gone when this process started."""
    chaos: tuple[str, ...] = ()
    """Faults to suffer; see `chaos.py`."""


class CancelledBeforeStart(ReplicasError):
    """The attempt was cancelled before its process came up."""


def main(assignment: Assignment) -> NoReturn:
    """Run one replica in a process of its own, and leave it."""
    global _at_second_sigterm
    faulthandler.enable()  # a segfault tells its Python stack
    if assignment.supervisor_pid is None:
        _at_second_sigterm = signal.SIG_IGN  # nobody else would write the outcome; whoever insists has SIGKILL
    signal.signal(signal.SIGTERM, _terminate)
    os.register_at_fork(after_in_child=_forget_terminate)
    code = 1
    try:
        code = _run(assignment)
    except (CancelledBeforeStart, SystemExit):
        code = TERMINATED
    except BaseException:
        traceback.print_exc()
    _leave(code)


def call(run: str) -> Any:
    """Run one replica inside a process that is not ours: the entrypoint of executors that know nothing of runs.

    Args:
        run: `<store url>/<run id>`. The rank comes from `REPLICA_RANK`.

    Returns: what the user's entrypoint returned, as a JSON value. Its exceptions are passed on.
    """
    store_url, run_id = split_address(run)
    store = store_at(store_url)
    rank = int(os.environ[environment.RANK])
    world_size = read_record(store, f"{run_id}/run.json", RunRecord.parse).world_size
    replica = claim(store, Assignment(store_url, run_id, rank, world_size, attempt=0))
    _set_environment(replica, None)
    heartbeat = Heartbeat(replica)
    heartbeat.start()
    started_at = time.time()
    try:
        task = _load(replica, read_task(store, run_id))
        outcome = outcome_of_value(replica, started_at, task())
        error: BaseException | None = None
    except BaseException as raised:
        outcome, error = outcome_of_error(replica, started_at, raised, raised.__traceback__), raised
    heartbeat.stop()
    standing = insist_on_outcome(store, run_id, outcome)
    if error is not None:
        raise error
    if standing.status is not ReplicaStatus.SUCCEEDED and standing.error:
        raise ReplicasError(standing.error)
    return outcome.result


def claim(store: Store, asked: Assignment) -> Replica:
    """Claim the attempt asked for, or the next free one: a vendor may start the same input twice.

    Raises:
        CancelledBeforeStart: an attempt on the way, from the one asked for on, was cancelled.
    """
    nonce = os.urandom(16).hex()
    record = {
        "nonce": nonce,
        "pid": os.getpid(),
        "pid_started": start_time(os.getpid()),
        "host": socket.gethostname(),
        "at": time.time(),
    }
    attempt = asked.attempt
    while True:
        if insist(functools.partial(exists, store, replica_key(asked.run_id, asked.rank, attempt, "cancel.json"))):
            now = time.time()
            cancelled = Outcome(
                asked.rank, attempt, ReplicaStatus.CANCELLED, "cancelled", pid=os.getpid(), started_at=now
            )
            insist_on_outcome(store, asked.run_id, cancelled)
            raise CancelledBeforeStart(f"Attempt {attempt} of rank {asked.rank} was cancelled before it started.")
        key = replica_key(asked.run_id, asked.rank, attempt, "started.json")
        if insist(functools.partial(_standing_nonce, store, key, to_bytes(record))) == nonce:
            break
        attempt += 1
    return Replica(asked.rank, asked.world_size, asked.run_id, attempt, asked.store_url, claimed_nonce=nonce)


def _standing_nonce(store: Store, key: str, record: bytes) -> str:
    """Create a claim and return the nonce of the one that stands; safe to do again when a reply was lost."""
    # Whether the create succeeded is not the question: only what stands decides.
    store.put_if_absent(key, record)
    return read_record(store, key, Claim.parse).nonce


def _run(assignment: Assignment) -> int:
    """Run the replica; return the process's exit code."""
    started_at = time.time()
    store = store_at(assignment.store_url)
    if assignment.chaos:
        from executors.chaos import troubled

        store = troubled(store, assignment.chaos, assignment.rank, assignment.attempt)
    replica = claim(store, assignment)
    replica.store = store
    heartbeat = Heartbeat(replica, supervisor_pid=assignment.supervisor_pid, grace_s=assignment.term_grace_s)
    deadline = _deadline(assignment, replica, started_at)
    try:
        _set_environment(replica, assignment.torch_threads)
        heartbeat.start()
        if deadline is not None:
            deadline.start()  # its SIGTERM may come at once
        task = _load(replica, assignment.task or read_task(store, replica.run_id, assignment.task_digest))
        value = task()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what is finished is worth writing down
        outcome = outcome_of_value(replica, started_at, value)
    except BaseException as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if _terminated and assignment.supervisor_pid is not None and not heartbeat.supervisor_is_gone:
            heartbeat.stop()
            return TERMINATED  # who sent SIGTERM knows why, and writes the outcome
        if deadline is not None and deadline.has_passed:
            outcome = outcome_of_timeout(replica, started_at, assignment.timeout_s or 0.0, TERMINATED)
        elif _terminated:
            has_supervisor = assignment.supervisor_pid is not None
            was_cancelled = not has_supervisor and _is_cancelled(replica)
            outcome = outcome_of_termination(replica, started_at, has_supervisor, was_cancelled)
        else:
            outcome = outcome_of_error(replica, started_at, error, error.__traceback__)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the user may have closed or unset it
            sys.stderr.write(f"{outcome.error}\n")
    if deadline is not None:
        deadline.stop()
    heartbeat.stop()
    _flush()
    if assignment.output_tail is not None:
        outcome = replace(outcome, output_tail=assignment.output_tail())
    insist_on_outcome(store, assignment.run_id, outcome)
    return outcome.exit_code if outcome.exit_code is not None else 1


def _is_cancelled(replica: Replica) -> bool:
    """Tell whether the cancel marker stands, as far as the store tells."""
    with contextlib.suppress(StoreError):
        return exists(replica.store, replica_key(replica.run_id, replica.rank, replica.attempt, "cancel.json"))
    return False


def _deadline(assignment: Assignment, replica: Replica, started_at: float) -> Deadline | None:
    limit_s = assignment.timeout_s
    if limit_s is None:
        return None
    from executors.deadline import TIMED_OUT, Deadline

    def end() -> None:
        outcome = outcome_of_timeout(replica, started_at, limit_s, TIMED_OUT)
        if assignment.output_tail is not None:
            outcome = replace(outcome, output_tail=assignment.output_tail())
        try:
            insist_on_outcome(replica.store, replica.run_id, outcome)
            kill_descendants(os.getpid())
        finally:
            os._exit(TIMED_OUT)

    spent_s = assignment.spent_s + time.time() - started_at
    return Deadline(limit_s - spent_s, assignment.term_grace_s, end)


def _load(replica: Replica, stored: StoredTask) -> Callable[[], Any]:
    """Load the task; seed every generator before the user's module is imported, and those that came with it after."""
    if stored.record.python_version is not None:  # it came from another machine
        from executors.versions import difference

        if told := difference(stored.record.python_version, stored.record.torch):
            print(told, file=sys.stderr)
    seeded = _seed(replica, stored.record.seed, but=set())
    function, args = stored.load()
    _seed(replica, stored.record.seed, but=seeded)
    if stored.record.rank_env is not None:
        os.environ[stored.record.rank_env] = str(replica.rank)
    return functools.partial(function, **args)


def _set_environment(replica: Replica, torch_threads: int | None) -> None:
    for name in environment.TORCH_DISTRIBUTED:
        if name in os.environ:
            del os.environ[name]
    os.environ[environment.RANK] = str(replica.rank)
    os.environ[environment.WORLD_SIZE] = str(replica.world_size)
    os.environ[environment.RUN_ID] = replica.run_id
    os.environ[environment.ATTEMPT] = str(replica.attempt)
    os.environ[environment.RENDEZVOUS] = replica.rendezvous
    set_current_replica(replica)
    if torch_threads is not None:
        threads = os.environ.setdefault("OMP_NUM_THREADS", str(torch_threads))
        if "torch" in sys.modules and threads.isdigit():  # imported before the variable was set: it must be told
            sys.modules["torch"].set_num_threads(int(threads))


def _seed(replica: Replica, seed: int | None, but: set[str]) -> set[str]:
    """Give every generator that is loaded a stream of this rank's own; return their names.

    Args:
        but: those seeded before, which the user's module may have seeded otherwise since.
    """
    source = f"{replica.run_id if seed is None else seed}/{replica.rank}"
    loaded: set[str] = {name for name in ("random", "numpy", "torch") if name in sys.modules}
    if "random" in loaded - but:
        random.seed(source)
    if not loaded - but - {"random"}:
        return loaded
    number = int.from_bytes(hashlib.sha256(source.encode()).digest()[:8], "big") >> 1
    if "numpy" in loaded - but:
        sys.modules["numpy"].random.seed(number % 2**32)
    if "torch" in loaded - but:
        torch = sys.modules["torch"]
        torch.default_generator.manual_seed(number)  # torch.manual_seed takes 3 ms on a build without accelerators
        if torch.version.cuda or torch.version.hip:
            torch.cuda.manual_seed_all(number)
    return loaded


_terminated = False
_at_second_sigterm = signal.SIG_DFL


def _terminate(signum: int, frame: FrameType | None) -> None:
    """Turn the first SIGTERM into SystemExit, so that `finally` runs; a second one ends what has a supervisor."""
    global _terminated
    _terminated = True
    signal.signal(signal.SIGTERM, _at_second_sigterm)
    raise SystemExit(TERMINATED)


def _forget_terminate() -> None:
    """Let a helper that the replica forks die of SIGTERM as any process: its pool would wait for it for ever."""
    if signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a full disk; closed or unset by the user
            stream.flush()
    flush_c_streams()


def _leave(code: int) -> NoReturn:
    """Run what was registered at exit, flush, and go without the half second that tearing torch down takes.

    What the user's code left running ends here: a supervisor that would do it may be gone.
    """
    try:
        atexit._run_exitfuncs()
        _flush()
        if children(os.getpid()):
            kill_descendants(os.getpid())
    finally:
        os._exit(code)


if __name__ == "__main__":
    from executors import standalone  # which imports this module once more, by its name

    standalone.main()
