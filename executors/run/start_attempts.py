"""Starts attempts of ranks: `start_attempts()`. Launch, resume, addition and restart all use this one flow.

    prepare        the caller notes what a later resume needs, or orders in the log that these ranks start
    hold lease     containers end on their own if this process dies from here on
    start          one order after the other; each at all its placements at the same time
    keep handles   a copy, which saves requests
    spares         beside the ranks
    finish         the containers of a detached start are released: they need this process no more

If a step fails, or Ctrl-C interrupts it, the steps are undone in reverse order. The lease is no longer renewed, and the
services end the jobs. The caller writes entries to the store that prevent later starts. The started replicas are
cancelled. All differences between the callers are in a `StartPlan`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from executors.attempt.handles import keep_handles
from executors.backend import Backend, JobsOfRun, no_progress
from executors.errors import LaunchError, ReplicasError, StoreError
from executors.restarts.lease import LeaseHolder, finish_start
from executors.run.spares import start_spares
from executors.settings.run_spec import StartSpec
from executors.store import Store
from executors.store.parallel import answered_within, in_parallel, in_threads, within

HEAD_START_S = 5.0  # the store gets this time to take the orders, before started replicas are cancelled
STORE_S = 20.0  # the longest wait for the store after the services were asked


@dataclass(frozen=True, kw_only=True)
class StartPlan:
    """The inputs in which a launch, a resume, an addition and a restart differ.

    Example:
        StartPlan(store=run.store, backend=run.placements, orders=[start])
    """

    store: Store
    """The store of the run."""
    backend: Backend
    """The placements of the run, or the backend that has all these ranks."""
    orders: Sequence[StartSpec]
    """The specs of the ranks to start, at least one. They are started one after the other."""
    lease: LeaseHolder | None = None
    """The lease of the containers, whose renewal has not begun. None: the containers need no lease, or this process
    already renews it.
    """
    prepare: Callable[[], None] = lambda: None
    """Writes what must be in the store, or on this machine, before the first replica starts."""
    undo: Callable[[BaseException, Sequence[int]], None] | None = None
    """Writes records into the store that prevent later starts. It gets the error, and the ranks that were started.

    None: the caller repeats a failed start, and finds the replicas and records that this start has left. Then nothing
        is ended, because an attempt of the same number may belong to another process.
    """


@dataclass(frozen=True)
class Started:
    """The replicas that a start has started, and the lease that the starting process renews.

    Example:
        start_attempts(plan).handles[0]
    """

    handles: Mapping[int, Any]
    """The handles by rank. An executor outside this project may have handles of its own type. Attempts that another
    process began first are left out.
    """
    lease: LeaseHolder | None
    """The lease of the containers. It is renewed for as long as the caller watches them."""


def start_attempts(plan: StartPlan, on_progress: Callable[[str], None] = no_progress) -> Started:
    """Start attempts of some ranks. If too few can be started, end all of them.

    Args:
        plan: the ranks, their backends, and the caller's records before the start and after a failure.
        on_progress: called with a few words on the progress of the start. Default: nothing is reported.

    Raises:
        LaunchError: too few could be started. Those that were started have been ended.
        BackendError: a backend cannot be used.
        StoreError: the store does not answer.

    Example:
        started = start_attempts(StartPlan(store=store, backend=placements, orders=[start], undo=abandon))
    """
    backend = plan.backend
    handles: dict[int, Any] = {}
    was_asked = False
    try:
        plan.prepare()
        if plan.lease is not None:
            plan.lease.start()
        for order in plan.orders:
            was_asked = True
            found: Sequence[Any] = backend.start_ranks(order, on_progress)
            # An executor outside this project may return handles of any type. They are in the order of the ranks.
            handles |= {each.rank: each for each in found} if backend.knows_attempts else dict(enumerate(found))
            _keep_handles(plan.store, order, found)
            if order.spec.settings.spares:
                start_spares(order, backend.start_ranks)
        finish_start(plan.lease, plan.orders[0].spec)
    except BaseException as error:
        if plan.lease is not None:
            plan.lease.end()
        if plan.undo is not None:
            _undo(plan, handles if was_asked else None, error)
        raise
    return Started(handles, plan.lease)


def _keep_handles(store: Store, order: StartSpec, handles: Sequence[Any]) -> None:
    """Write all handles into one object, which saves requests. Without this object, readers read each handle
    separately.
    """
    if max(order.ranks) >= order.spec.world_size:  # not for added ranks: some readers do not know their backend
        return
    with contextlib.suppress(StoreError):
        within(STORE_S, lambda: keep_handles(store, order.spec.run_id, order.spec.attempt, handles), store.url)


def _undo(plan: StartPlan, handles: Mapping[int, Any] | None, error: BaseException) -> None:
    """End the replicas that a failed start has started, and prevent later starts of the others.

    Args:
        plan: the start.
        handles: the handles of the started replicas. None: no backend was asked.
        error: the reason of the failure.
    """
    assert plan.undo is not None
    undo, url = plan.undo, plan.store.url
    if handles is not None:  # the services come first: a store that does not answer must not keep paid jobs running
        _end_at_services(plan, error)
    (recorded,) = in_threads(lambda _: undo(error, sorted(handles or ())), [None], 1)
    if handles:
        # The store has some seconds for the caller's orders, so that no controller restarts the ended replicas.
        with contextlib.suppress(ReplicasError):
            answered_within(HEAD_START_S, recorded, url)

        def end(handle: Any) -> None:
            # An executor of the user may raise any error, but the caller needs the first error.
            with contextlib.suppress(Exception):
                plan.backend.cancel(handle)

        in_parallel(end, list(handles.values()))
    with contextlib.suppress(ReplicasError):
        answered_within(STORE_S, recorded, url)


def _end_at_services(plan: StartPlan, error: BaseException) -> None:
    """End the jobs of a start at their services. The store is not asked."""
    # A backend raises LaunchError after it has ended its own replicas.
    if not plan.backend.ends_jobs or isinstance(error, LaunchError):
        return
    spec = plan.orders[0].spec
    ranks = tuple(sorted({rank for order in plan.orders for rank in order.ranks}))
    left = plan.backend.end_jobs(JobsOfRun(spec.run_id, spec.store_url, spec.launched_at, ranks), _warn)
    if not left.is_complete:
        _warn(left.what_is_left)


def _warn(words: str) -> None:
    print(f"replicas: {words}", file=sys.stderr)
