"""Starts a run's ranks on several backends in parallel. If too few can be started, all started ranks are ended."""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from executors.attempt import Attempt, launch_failed_message
from executors.backend import Backend, JobsOfRun
from executors.errors import LaunchError, ReplicasError, StoreError
from executors.process import this_process
from executors.protocol import ReplicaHandle
from executors.settings.run_spec import RunSpec
from executors.store import store_at
from executors.store.parallel import answered_within, in_parallel, in_threads, within

HEAD_START_S = 5.0  # the store gets this time first, before the services are asked to end the started jobs
STORE_S = 60.0  # after the services were asked, Ctrl-C waits this long for the store and for starts that end


@dataclass(frozen=True)
class Part:
    """The ranks that one backend starts."""

    backend_name: str
    ranks: tuple[int, ...]
    start: Callable[[Callable[[str], None]], list[ReplicaHandle]]
    """Starts the ranks. Its argument is called with a few words on the progress. It raises LaunchError if no rank has
    started, and BackendError if the backend is not installed on this machine.
    """


def start_parts(
    backend: Backend, run: RunSpec, parts: Sequence[Part], on_progress: Callable[[str], None]
) -> list[ReplicaHandle]:
    """Start all parts at the same time.

    If too few replicas are started, or the start is interrupted, all started replicas are ended.

    Args:
        backend: ends replicas at each of the backends.
        run: the run, with the ranks to start.
        parts: the ranks by their backends, at least two.
        on_progress: called with a few words on the progress of the start, which name the backend.

    Returns:
        The handles, in the order of the ranks.

    Raises:
        LaunchError: too few could be started.

    Example:
        start_parts(placements, spec, [Part("local", (0, 1), start_here), Part("modal", (2,), start_there)], print)
    """
    handles: list[ReplicaHandle] = []
    errors: list[tuple[Part, ReplicasError | OSError]] = []
    begins = threading.Event()  # otherwise Ctrl-C could leave a thread that starts jobs which no process knows

    def start_then(part: Part) -> list[ReplicaHandle]:
        begins.wait()
        return part.start(lambda words: on_progress(f"{part.backend_name}: {words}"))

    futures = in_threads(start_then, parts, len(parts))
    try:
        begins.set()
        for part, future in zip(parts, futures, strict=True):
            try:
                handles += future.result()
            except (ReplicasError, OSError) as error:
                errors.append((part, error))
    except BaseException as interrupt:  # Ctrl-C
        _end_all(backend, run, futures, interrupt)
        raise
    started = sorted(handles, key=lambda handle: handle.rank)
    if not errors and (run.settings.min_replicas is None or len(started) >= run.settings.min_replicas):
        return started
    for part, problem in errors:
        # The backend has ended its own replicas. Attempts that another process claimed are not changed.
        _abandon(filter(_take, _attempts(run, part.ranks)), problem)
    if run.settings.min_replicas is not None and len(started) >= run.settings.min_replicas:
        for _, problem in errors:
            _say(f"started with {len(started)} of {len(run.ranks)} replicas: {problem}")
        return started
    cause = errors[0][1] if errors else None
    why = f"only {len(started)} of {len(run.ranks)} replicas could be started" if cause is None else str(cause)
    _end(backend, run, started, LaunchError(why))
    raise LaunchError(
        f"{why.rstrip('.')}. Those at other backends were ended, too.",
        rank=getattr(cause, "rank", None),
        cancelled=getattr(cause, "cancelled", False),
    ) from cause


def _end_all(
    backend: Backend, run: RunSpec, parts: Iterable[Future[list[ReplicaHandle]]], interrupt: BaseException
) -> None:
    """End all replicas whose start has begun.

    Outcomes are written last, because a rank with an outcome is not ended.
    """
    _say("ending the replicas whose start has begun; press Ctrl-C again to let them end by themselves when they start")
    # The services are asked first, because a store that does not answer must not keep paid jobs running.
    told = backend.end_jobs(JobsOfRun(run.run_id, run.store_url, run.launched_at, run.ranks), _say)
    if not told.is_complete:
        _say(told.what_is_left)

    def leave_markers() -> None:
        ours = [attempt for attempt in _attempts(run, run.ranks) if _take(attempt) or _is_ours(attempt)]
        for attempt in ours:
            with contextlib.suppress(ReplicasError):
                attempt.request_cancel(launch_failed_message(interrupt))
        for part in parts:
            with contextlib.suppress(Exception):
                _end(backend, run, part.result(), interrupt)
        _abandon(ours, interrupt)

    with contextlib.suppress(StoreError):
        within(STORE_S, leave_markers, run.store_url)


def _abandon(attempts: Iterable[Attempt], error: BaseException) -> None:
    for attempt in attempts:
        with contextlib.suppress(ReplicasError):
            attempt.abandon(error)


def _end(backend: Backend, run: RunSpec, handles: Sequence[ReplicaHandle], error: BaseException) -> None:
    """End replicas that were started.

    First the store gets some seconds for the cancel markers; then the services are asked.
    """
    ranks = tuple(handle.rank for handle in handles)
    (marked,) = in_threads(lambda _: _abandon(_attempts(run, ranks), error), [None], 1)
    with contextlib.suppress(StoreError):
        answered_within(HEAD_START_S, marked, run.store_url)
    told = backend.end_jobs(JobsOfRun(run.run_id, run.store_url, run.launched_at, ranks), _say)
    if not told.is_complete:
        _say(told.what_is_left)

    def end(handle: ReplicaHandle) -> None:
        with contextlib.suppress(ReplicasError):
            backend.cancel(handle)

    in_parallel(end, [handle for handle in handles if (handle.rank, run.attempt) not in told.attempts])


def _attempts(run: RunSpec, ranks: Sequence[int]) -> list[Attempt]:
    return [Attempt(store_at(run.store_url), run.run_id, rank, run.attempt) for rank in ranks]


def _take(attempt: Attempt) -> bool:
    """Claim the start of an attempt, so that no other process starts it.

    Return False if another process has claimed it.
    """
    with contextlib.suppress(ReplicasError):
        return attempt.started_by() is None and attempt.create_intent(secrets.token_hex(16))
    return False


def _is_ours(attempt: Attempt) -> bool:
    """Return True if this process has claimed the start of the attempt."""
    with contextlib.suppress(ReplicasError):
        return attempt.started_by() == this_process()
    return False


def _say(words: str) -> None:
    print(f"replicas: {words}", file=sys.stderr)
