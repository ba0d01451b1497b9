"""Adds replicas to a running run: new ranks, on any backend that can reach the run's store."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from executors.attempt import Attempt, launch_failed_message
from executors.backend import Backend, as_backend, as_executor
from executors.errors import BackendError, LaunchError, StoreError
from executors.protocol import ReplicaStatus, ServerlessExecutor
from executors.registry import check_executor, describe_executor, get_executor
from executors.registry.placements import check_single_ranks
from executors.registry.run_index import reference, remember_added
from executors.restarts.decision_log import DecisionLog, blocking_order
from executors.restarts.lease import LeaseHolder, new_lease, with_lease
from executors.restarts.orders import order_cancel, order_resume
from executors.run.removal import names_removal
from executors.run.start_attempts import StartPlan, start_attempts
from executors.run.start_spec import (
    check_env,
    check_folder,
    check_pickle_of,
    check_requirements,
    secrets_to_give,
    spec_of,
    trusted_task,
    with_own_task,
)
from executors.settings import Settings
from executors.settings.durations import name_duration
from executors.settings.run_spec import StartSpec
from executors.settings.settings import MAX_WORLD_SIZE
from executors.status import name_ranks
from executors.store.records import exists
from executors.store.url import directory_of
from executors.task.addition_record import take_ranks
from executors.task.command import Command
from executors.task.create import add_code
from executors.task.launch_request import LaunchRequest
from executors.task.record import LaunchedWith, Placement
from executors.task.removal_record import check_not_removed
from executors.task.stored import StoredTask
from executors.view.run_view import RunView

NO_RANK = 10**6  # a rank that no run has: orders that block this rank block all ranks


@dataclass(frozen=True, kw_only=True)
class AdditionRequest:
    """The values that a user gives to add replicas to a run. `Run.add` describes each."""

    n: int
    gpu: str | None = None
    timeout: float | None = None
    env: Mapping[str, str] | None = None
    secrets: Sequence[str] | None = None
    detach: bool = False
    task_digest: str | None = None
    trust_bucket: bool = False

    def __post_init__(self) -> None:
        if type(self.n) is not int or not 1 <= self.n <= MAX_WORLD_SIZE:
            raise ValueError(f"n must be a number of replicas from 1 to {MAX_WORLD_SIZE}, got n={self.n!r}.")


@dataclass(frozen=True)
class AddedReplicas:
    """Replicas that were added to a run."""

    start_spec: StartSpec
    """The values that start the new replicas, also for restarts."""
    lease: LeaseHolder | None
    """The lease of the containers of the new replicas. None: they need no lease."""


@names_removal(lambda run: run)
def add_replicas(
    run: RunView, executor: str | ServerlessExecutor, asked: AdditionRequest, on_progress: Callable[[str], None]
) -> AddedReplicas:
    """Check everything, take ranks, and start them; see `Run.add`."""
    name = reference(run.run_id, run.store.url)
    check_not_removed(run.store, run.run_id, name)
    given = get_executor(executor) if isinstance(executor, str) else check_executor(executor)
    backend = check_single_ranks(as_backend(given))
    task = trusted_task(run, task_digest=asked.task_digest, trust_bucket=asked.trust_bucket)
    if task.record.code_sha256 is None or not backend.ships_code:  # the replicas get the code of this folder
        check_folder(run, task, f"add --n {asked.n}")
    _check_run(run)
    launched, env = task.launched_with, dict(asked.env or {})
    settings, first = launched.settings, launched.placements[0]
    check_env(run, first, env)
    secrets = _inherited_secrets(run, backend, launched) if asked.secrets is None else tuple(asked.secrets)
    spec = replace(spec_of(run, task, detach=asked.detach), env=env, secret_names=secrets)
    spec = spec.with_settings(min_replicas=None, max_cost=None)  # `max_cost` of the run does not include the additions
    spec = with_lease(spec, backend.lease_s, detach=asked.detach)
    timeout_s = asked.timeout or first.timeout_s or backend.default_timeout_s
    gpu = first.gpu if asked.gpu is None else asked.gpu or None
    _check_start(run, backend, task, asked, settings.with_(n=asked.n, gpu=gpu, timeout=timeout_s, secrets=secrets))
    if task.record.code_sha256 is not None:
        check_requirements(run, backend, task)
    n_seen, is_blocked = _check_bar(run, spec.key)
    # If the launch packed no code for other machines, the added replicas get the code of this process, also after a
    # restart.
    if settings.max_cost is not None:
        limit = "" if timeout_s is None else f": each may run for {name_duration(timeout_s)}, and again after a restart"
        what = f"max_cost={settings.max_cost:g} of run {run.run_id!r}"
        print(f"replicas: {what} does not limit the cost of added replicas{limit}", file=sys.stderr)
    package = None if task.record.code_sha256 else backend.package(task.record.entrypoint or len)
    own_task = None if package is None else add_code(task, package)
    place = Placement(
        **describe_executor(as_executor(backend)),
        env=tuple(sorted(env)),
        secrets=tuple(sorted(spec.secret_names)),
        gpu=gpu,
        timeout_s=timeout_s,
        own_task=own_task,
    )
    ranks: list[int] = []
    while len(ranks) < asked.n:
        added = take_ranks(run.store, run.run_id, run.world_size, asked.n - len(ranks), place)
        with contextlib.suppress(StoreError):  # without this note, a resume must name these ranks
            remember_added(run.run_id, run.store.url, added.name, backend.options_to_keep)
        run.placements.add(added, backend)
        # A replica that joins may have claimed one of the ranks in the meantime. That rank is not started here.
        ranks += [rank for rank in added.ranks if not Attempt(run.store, run.run_id, rank).has_started()]
    spec = with_own_task(replace(spec, ranks=tuple(ranks)), place)
    start = StartSpec(spec, task.given_entrypoint, gpu, timeout_s)
    log = DecisionLog(run.store, run.run_id, key=spec.key)

    def prepare() -> None:
        # A removal may not have seen the record of the ranks; then this check sees the removal.
        check_not_removed(run.store, run.run_id, name)
        if is_blocked and order_resume(log, dict.fromkeys(ranks, 0), n_seen) is not None:
            raise _ended_meanwhile(run)

    def undo(error: BaseException, _: Sequence[int]) -> None:
        order_cancel(log, ranks, launch_failed_message(error))  # so that no controller restarts the new ranks
        for rank in ranks:
            Attempt(run.store, run.run_id, rank).abandon(error)

    # The lease of an attached run is already renewed by another process, so the addition only uses it.
    lease = new_lease(run.store, spec, yields=not asked.detach)
    plan = StartPlan(store=run.store, backend=run.placements, orders=[start], lease=lease, prepare=prepare, undo=undo)
    start_attempts(plan, on_progress)
    if lease is not None and lease.is_released:
        _warn_that_it_continues(run, ranks, timeout_s)
    return AddedReplicas(start, lease)


def _inherited_secrets(run: RunView, backend: Backend, launched: LaunchedWith) -> tuple[str, ...]:
    """Return the names of the launch's secrets. Return none for a backend that the launch did not use.

    Another backend does not have secrets of these names.
    """
    first = launched.placements[0]
    if backend.backend_name in (backends := [place.backend for place in launched.placements]):
        return secrets_to_give(run, first, ())
    if first.secrets:
        print(
            f"replicas: the replicas added on {backend.backend_name!r} get none of the launch's secrets, which "
            f"belong to {' and '.join(map(repr, backends))}: {', '.join(first.secrets)}. Give others with --secret or "
            "secrets=.",
            file=sys.stderr,
        )
    return ()


@contextlib.contextmanager
def _noting_inherited_values(asked: AdditionRequest, settings: Settings) -> Iterator[None]:
    """Add a note to an error within the block, if the user did not give a value and the launch's value was used."""
    try:
        yield
    except (BackendError, ValueError) as error:
        if asked.gpu is None and settings.gpu is not None:
            error.add_note(f"The GPU {settings.gpu!r} is the launch's: give another with --gpu, or --gpu '' for none.")
        if asked.secrets is None and settings.secrets:
            names = ", ".join(map(repr, settings.secrets))
            error.add_note(f"The launch's secrets count here, too: {names}. Name others with --secret, or '' for none.")
        raise


def _warn_that_it_continues(run: RunView, ranks: Sequence[int], timeout_s: float | None) -> None:
    until = "" if timeout_s is None else ", to their time limit"
    option = name_ranks(ranks).partition(" ")[2].replace(" ", "")
    print(
        f"replicas: Run {run.run_id!r} continues on its own, and the added replicas do, too{until}. "
        f"End it: replicas cancel {reference(run.run_id, run.store.url)} --rank {option}",
        file=sys.stderr,
    )


def _check_run(run: RunView) -> None:
    """Raises: BackendError, ValueError, StoreError: nothing can be added to the run."""
    for placed in run.placements.placed:
        backend = None
        with contextlib.suppress(BackendError):  # the backends of other ranks need not be installed on this machine
            backend = placed.backend
        if backend is not None:
            check_single_ranks(backend)
    if exists(run.store, f"{run.run_id}/abort.json"):
        raise StoreError(f"Run {run.run_id!r} was aborted, which is final. Launch a new one.", url=run.store.url)
    try:
        now = run.status(reports=False)
        ended = now.counts if now.is_terminal else ""
        has_failed = any(state.status is not ReplicaStatus.SUCCEEDED for state in now.replicas)
    except BackendError:  # the state of the other ranks comes from the store
        attempts = (Attempt(run.store, run.run_id, rank).newest() for rank in run.placements.ranks)
        has_failed, ended = True, "all have ended" if all(each.outcome() is not None for each in attempts) else ""
    if ended:
        name = reference(run.run_id, run.store.url)
        # In a run that has succeeded, `resume` without a new total would find nothing to resume.
        more = "" if has_failed else " --total-steps N"
        how = f"{'Resume' if has_failed else 'Extend'} it first: replicas resume {name}{more}"
        raise ValueError(f"Run {run.run_id!r} has ended ({ended}), so no replica can join it. {how}")


def _check_start(run: RunView, backend: Backend, task: StoredTask, asked: AdditionRequest, settings: Settings) -> None:
    """Raise an error for an addition that cannot work, before anything is written or started."""
    name, store = backend.backend_name, run.store
    if backend.needs_shared_rendezvous and directory_of(store.url) is not None:
        raise BackendError(
            f"Run {run.run_id!r} meets in {store.url}, a directory that replicas on {name!r} do not see. Only a run "
            "whose rendezvous all replicas reach can have replicas there. Launch it with --rendezvous s3://BUCKET/…"
        )
    check_pickle_of(task, backend)
    words = task.record.command
    # A pickled callable is not loaded here, so any callable stands for it.
    entrypoint = Command.of(words) if words else task.record.entrypoint or len
    args = dict(task.record.args or {}) | dict.fromkeys(task.record.arg_texts, "") if task.record.entrypoint else {}
    with _noting_inherited_values(asked, settings):
        backend.check_launch(LaunchRequest(entrypoint=entrypoint, settings=settings, args=args))


def _check_bar(run: RunView, key: str | None) -> tuple[int, bool]:
    """Return the number of entries in the decision log, and True if an order to cancel or stop all ranks blocks new
    ranks.

    Raises:
        LaunchError: an order blocks new ranks, and the run was not resumed after it, because the run is ending.
    """
    entries = DecisionLog(run.store, run.run_id, key=key).read()
    order = blocking_order(entries, NO_RANK)
    if order is not None and not any(entry.kind == "resume" for entry in entries[list(entries).index(order) :]):
        raise _ended_meanwhile(run)
    return len(entries), order is not None


def _ended_meanwhile(run: RunView) -> LaunchError:
    return LaunchError(f"Run {run.run_id!r} was ended meanwhile: nothing is added to it.", cancelled=True)
