"""Starts new attempts of ranks that have ended: `resume()`.

The task and the store stay the same, or a new run begins from a snapshot.

A resumed replica finds out itself where to continue: `diloco` reads the log of its run.
"""

from __future__ import annotations

import contextlib
import itertools
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from executors.attempt import Attempt, launch_failed_message
from executors.backend import Backend, affordable_s, no_progress
from executors.errors import (
    AlreadyResumedError,
    BackendError,
    CorruptObjectError,
    LaunchError,
    ReplicasError,
    RunBeingRemovedError,
    RunNotFoundError,
    StoreError,
)
from executors.notices.targets import resolve_targets
from executors.process import this_process
from executors.protocol import ReplicaStatus
from executors.registry.placements import Placements, check_single_ranks
from executors.registry.run_index import claim_run_folder, reference, remember_launch
from executors.restarts.decision_log import MAX_TOTAL, DecisionLog, extensions_of, hang_of, policy_of, rules_of
from executors.restarts.lease import new_lease, release_lease, with_lease
from executors.restarts.orders import abandon_run, order_cancel, order_policy, order_resume, take_back_resume
from executors.run.removal import names_removal
from executors.run.run import Run, manager_of, view_of
from executors.run.start_attempts import StartPlan, start_attempts
from executors.run.start_spec import resumable_placements, spec_of, start_specs_of, trusted_task
from executors.settings import Settings
from executors.settings.policy import HangLimits, Restarts
from executors.settings.run_spec import StartSpec
from executors.settings.watch_rules import rule_texts
from executors.status import ReplicaState, name_ranks
from executors.store.records import exists
from executors.store.run_key import parse_key
from executors.store.url import new_run_id
from executors.task.create import continue_run
from executors.task.removal_record import check_not_removed
from executors.task.stored import StoredTask
from executors.view.run_model import load_reader
from executors.view.run_view import RunView

MAX_NAME = 200  # the longest name of a process from a record, in characters


@names_removal(view_of)
def resume(
    run: Run,
    *,
    ranks: Sequence[int] | None = None,
    gpu: str | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    secrets: Sequence[str] = (),
    gather_s: float | None = None,
    restarts: Restarts | int | str | None = None,
    hang_timeout: str | float | None = None,
    start_timeout: str | float | None = None,
    detach: bool = False,
    task_digest: str | None = None,
    trust_bucket: bool = False,
    from_snapshot: bool = False,
    total_steps: int | None = None,
    total_rounds: int | None = None,
    notify: Sequence[str] = (),
    notify_on: str | Sequence[str] | None = None,
    rules: Sequence[str] | None = None,
    on_progress: Callable[[str], None] = no_progress,
) -> Run:
    """Start a new attempt of every rank that ended without succeeding.

    Args:
        run: the run. Replicas that still run are not changed.
        ranks: the ranks to start. Each must have ended. Default: all ranks that ended without succeeding.
        gpu: the GPU of each replica, as in "H100:2". Default: the GPU of the launch.
        timeout: how long each replica may run, in seconds. Default: the limit of the launch. In a run with `max_cost`,
            each rank gets no more than the rest of its share. A new run from a snapshot gets the whole amount again.
        env: the environment variables of the launch, with their values, because values are not recorded.
        secrets: the names of the secrets of the launch, if another machine launched the run.
        gather_s: how long to wait for more than `min_replicas` replicas, in seconds. Default: the time of the launch.
        restarts: the restart policy of all ranks from now on: a number, a text such as "3/1h,oom=0", or a `Restarts`.
            "none" restarts nothing. Default: the current policy.
        hang_timeout: how long a replica may run without progress, for all ranks from now on. Default: the current
            value.
        start_timeout: how long a replica may take to its first progress, for all ranks from now on. Default: the
            current value.
        detach: True if the replicas continue when this process ends. Default: False.
        task_digest: the sha256 of the task, for a run that another machine launched. `Run.task_digest` returns it on
            that machine.
        trust_bucket: True starts the task that the run's store holds, with the credentials of this machine.
        from_snapshot: True begins a new run of the same task, under a new id and with all ranks, from the newest whole
            snapshot. Use it for a run whose store is damaged. The rounds after that snapshot are lost, and so is work
            that was in no round. Artifacts stay with the old run, and added ranks are left out. The state that
            `DiLoCo.attach_state` kept until the snapshot is restored. The old run's store is needed until the new run
            has had its first round. An entrypoint without `DiLoCo` starts from its beginning.
        total_steps: the new number of inner steps of the run, more than its plan has. Ranks that have succeeded start
            again, too. Replicas that still run continue to the new total when they reach the old one. The script need
            not change: `DiLoCo` reads the extension, and a loop over `diloco.steps()` continues.
        total_rounds: the new number of rounds of a run whose rounds go by the clock.
        notify: the URLs to which events of the run are sent, as `launch()` takes them. They are not recorded, so give
            them again. Default: none.
        notify_on: the events to send. Default: the events of the launch.
        rules: the rules of all attempts that start from now on, in place of all earlier rules, as in
            ["loss > 8 -> stop"]. An empty list, or ["none"], stands for no rules. Default: the current rules.
        on_progress: called with a few words on the progress, if the start takes long. Default: nothing is reported.

    Returns:
        The run, with the handles of the new attempts. With `from_snapshot` it is the new run. It is `run` itself if the
        run was extended and every rank still runs.

    Raises:
        ValueError: no rank can be resumed, a rank of `ranks` still runs, or the run cannot be extended so. With
            `from_snapshot`, it is also raised if any rank still runs. It is also raised if this machine lacks a
            variable, a secret, an option or a key of the run.
        UntrustedTaskError: another machine launched the run, and the user gives neither its digest nor trust.
        BackendError: the backend cannot start single ranks, or one of several is not installed on this machine.
        AlreadyResumedError: another process is resuming the same ranks. If that process resumes only some of them, this
            call resumes the others, and a line on stderr names the ranks that it left out.
        LaunchError: the run was cancelled or stopped during the call, or the backend refused a replica. Replicas that
            were already started have been ended.
        StoreError: the run was aborted, which is final for its id, or its task differs from the launch.

    Example:
        resume(attach("brave-otter-7f3a"), restarts=3).wait()
    """
    view = view_of(run)
    new_restarts = Restarts.of(restarts)
    HangLimits.of(hang_timeout, start_timeout)  # raises an error for a wrong value before anything is read
    totals = _totals(total_steps, total_rounds)
    name = reference(view.run_id, view.store.url)
    check_not_removed(view.store, view.run_id, name)
    task = trusted_task(view, task_digest=task_digest, trust_bucket=trust_bucket)
    launched = task.launched_with
    view.placements.named = frozenset(ranks or ())
    urls = resolve_targets(notify)
    changes: dict[str, Any] = {}
    if notify_on is not None:
        changes["notify_on"] = Settings.of(n=1, notify_on=notify_on).notify_on
    new_rules = None if rules is None else rule_texts(rules)
    given: Any = {"gpu": gpu, "timeout": timeout, "env": env, "secrets": secrets, "detach": detach}
    given["verb"] = "resume --from-snapshot" if from_snapshot else "resume"
    start_specs = start_specs_of(view, task, ranks=range(view.world_size) if from_snapshot else ranks, **given)
    placements = resumable_placements(view)
    has_new_hang = hang_timeout is not None or start_timeout is not None
    asks_for_restarts = new_restarts is not None and not new_restarts.nothing
    if (asks_for_restarts or has_new_hang or new_rules) and not placements.starts_single_ranks:
        raise ValueError(
            f"Backend {view.backend!r} has no process that supervises a replica. Remove restarts=, hang_timeout=, "
            "start_timeout= and rules=."
        )
    if from_snapshot:
        _check_that_all_ended(view, ranks)
    elif exists(view.store, f"{view.run_id}/abort.json"):
        raise StoreError(f"Run {view.run_id!r} was aborted, which is final. Launch a new one.", url=view.store.url)
    if gather_s is not None and launched.settings.min_replicas is None:
        raise ValueError(
            f"Run {view.run_id!r} was launched without min_replicas, so gather_s= (--gather) has no effect."
        )
    log = DecisionLog(view.store, view.run_id, key=spec_of(view, task, detach=detach).key)
    policy = (
        new_restarts if new_restarts is not None else policy_of(log.read(), Restarts.of(launched.settings.restarts))
    )
    hang = hang_of(log.entries, launched.settings.hang_limits).changed(hang_timeout, start_timeout)
    more: dict[str, Any] = {**hang.texts, "restarts": None if policy is None else str(policy)}
    more["rules"] = new_rules if new_rules is not None else rules_of(log.entries, launched.settings.rules)
    if new_rules is not None or new_restarts is not None:  # a rule that restarts needs a policy that allows it
        Settings.of(n=1, restarts=policy, rules=more["rules"])
    if gather_s is not None:
        more["gather_s"] = gather_s
    start_specs = [start_spec.with_settings(**more, **changes).with_spec(notify=urls) for start_spec in start_specs]
    if totals:
        _check_extension(view, log, start_specs[0].spec.key, totals)
    if from_snapshot:
        extensions = [{name: total} for name, found in extensions_of(log.entries).items() for total in found]
        return _begin_from_snapshot(
            view, task, start_specs[0], [*extensions, *([totals] if totals else [])], on_progress
        )
    if not placements.needs_shared_rendezvous:  # on this backend, a rank with a newer attempt would refuse to start
        claim_run_folder(view.run_id, view.store.url, task.digest)
    n_seen = len(log.read())
    startable = {rank for start_spec in start_specs for rank in start_spec.ranks}
    next_attempts = _next_attempts(view, ranks, startable, is_extended=bool(totals))
    _check_backends(view, next_attempts)
    if new_restarts or has_new_hang or new_rules is not None or totals:
        order_policy(log, new_restarts, hang if has_new_hang else None, rules=new_rules, totals=totals)
    if not next_attempts:
        return run
    if (barring := order_resume(log, next_attempts, n_seen)) is not None:
        what = "cancelled" if barring.kind == "cancel" else "stopped"
        raise LaunchError(f"Run {view.run_id!r} was {what} meanwhile by {_name(barring.by)}.", cancelled=True)
    try:
        check_not_removed(view.store, view.run_id, name)
    except RunBeingRemovedError:
        # The removal may not have seen the order in the log. If it has seen the order, it does not delete the run.
        with contextlib.suppress(StoreError):
            take_back_resume(log, next_attempts, "the run is being removed")
        raise
    if detach and placements.lease_s is not None:
        release_lease(view.store, view.run_id)
    if detach:
        start_specs = _with_own_lease(start_specs, placements)

    def undo(error: BaseException, begun: Sequence[int]) -> None:
        why = launch_failed_message(error)
        order_cancel(log, begun, why)  # so that no controller restarts the attempts that are ended now
        for rank in begun:
            Attempt(view.store, view.run_id, rank, next_attempts[rank]).request_cancel(why)
        take_back_resume(log, next_attempts, str(error) or type(error).__name__)

    leases = (new_lease(view.store, start_spec.spec) for start_spec in start_specs)
    started = start_attempts(
        StartPlan(
            store=view.store,
            backend=placements,
            orders=_orders(start_specs, next_attempts, n_others=len(view.ranks) - len(next_attempts)),
            lease=next(filter(None, leases), None),
            undo=undo,
        ),
        on_progress,
    )
    begun, enough = started.handles, launched.settings.min_replicas
    if overtaken := {rank: attempt for rank, attempt in next_attempts.items() if rank not in begun}:
        if not begun:
            by_others = _who_resumes(view, overtaken)
            raise AlreadyResumedError(f"{by_others} Follow it: `replicas wait {shlex.quote(view.url)}`.")
        # With `min_replicas`, some attempts may be missing, because this process could not start them or has not
        # started them yet.
        if by_others := _who_resumes(view, overtaken, but=this_process() if enough else None):
            print(f"replicas: {by_others}", file=sys.stderr)
    found = Run(view.store, view.run_id, executor=placements)
    if not detach:
        manager_of(found).restart_here(start_specs, started.lease)
        manager_of(found).notify_here(start_specs[0].spec)
    return found


def _orders(start_specs: Sequence[StartSpec], next_attempts: Mapping[int, int], *, n_others: int) -> list[StartSpec]:
    """Group the ranks to resume into starts.

    Ranks start together if their values and their next attempt numbers are equal.

    Args:
        start_specs: the values that start the ranks of the launch, and of each addition.
        next_attempts: the attempts to start, by rank.
        n_others: the number of ranks that are not started. They count for `min_replicas`.
    """
    orders = []
    for attempt, start_spec in itertools.product(sorted({*next_attempts.values()}), start_specs):
        ranks = tuple(rank for rank in start_spec.ranks if next_attempts.get(rank) == attempt)
        if not ranks:
            continue
        enough = start_spec.spec.settings.min_replicas
        needed = enough and max(1, min(enough - n_others, len(ranks)))
        orders.append(start_spec.with_spec(ranks=ranks, attempt=attempt).with_settings(min_replicas=needed))
    return orders


def _with_own_lease(start_specs: Sequence[StartSpec], backend: Backend) -> list[StartSpec]:
    """Return the values to start a detached resume, with one lease that this process holds until the start is
    complete.
    """
    leased = with_lease(start_specs[0].spec, backend.lease_s, detach=True)
    lease: Any = {"lease_s": leased.lease_s, "lease_name": leased.lease_name}
    return [start_spec.with_spec(**lease) for start_spec in start_specs]


def _totals(total_steps: int | None, total_rounds: int | None) -> dict[str, int]:
    """Return the new total of a run by the name of its argument. Empty if the run is not extended.

    Raises:
        TypeError: a total is not an integer.
        ValueError: a total is out of range, or both are given.
    """
    given = {"total_steps": total_steps, "total_rounds": total_rounds}
    totals = {name: total for name, total in given.items() if total is not None}
    if len(totals) > 1:
        raise ValueError("Give total_steps (--total-steps) or total_rounds (--total-rounds), not both.")
    for name, total in totals.items():
        if isinstance(total, bool) or not isinstance(total, int):
            raise TypeError(f"{name} must be a whole number, got {name}={total!r}.")
        if not 1 <= total <= MAX_TOTAL:
            raise ValueError(f"{name} must be from 1 to {MAX_TOTAL}, got {name}={total}.")
    return totals


def _check_extension(run: RunView, log: DecisionLog, key: str | None, totals: Mapping[str, int]) -> None:
    """Check, as far as this machine can, that a run can be extended to a new total.

    Raises:
        ValueError: the run cannot be extended so.
    """
    for name, total in totals.items():
        newest = max(extensions_of(log.entries)[name], default=0)
        if total < newest:
            raise ValueError(f"Run {run.run_id!r} was extended to {name}={newest} already, got {name}={total}.")
    try:
        check = load_reader("extension")
    except ReplicasError:  # diloco is not installed on this machine, so the replicas check the order
        return
    check(run.store, run.run_id, None if key is None else parse_key(key), totals)


def _check_that_all_ended(run: RunView, ranks: Sequence[int] | None) -> None:
    if ranks is not None:
        raise ValueError("A new run from a snapshot has all ranks: remove ranks=")
    status = run.status()
    if not all(state.status.is_terminal for state in status.replicas):
        raise ValueError(
            f"Run {run.run_id!r} has not ended ({status.counts}), and a new run from its snapshot would train at "
            f"the same time. End it first: replicas cancel {run.run_id}"
        )


def _begin_from_snapshot(
    run: RunView,
    task: StoredTask,
    start_spec: StartSpec,
    extensions: Sequence[Mapping[str, int]],
    on_progress: Callable[[str], None],
) -> Run:
    """Write and start a new run with the task of an old run, from a snapshot of the old run.

    Args:
        extensions: the extended totals of the old run, which also count for the new run.
    """
    placements = Placements(run.placements.groups[0].placed)
    timeout_s = start_spec.timeout_s
    if (max_cost := task.launched_with.settings.max_cost) is not None:
        affordable = affordable_s(placements, start_spec.spec.world_size, start_spec.gpu, max_cost)
        timeout_s = affordable if timeout_s is None else min(timeout_s, affordable)
    new = replace(start_spec.spec, run_id=new_run_id())
    spec = continue_run(task, new, run.record, gpu=start_spec.gpu, timeout=timeout_s)
    start_spec = replace(start_spec, spec=spec, timeout_s=timeout_s)
    if spec.settings.detach:
        (start_spec,) = _with_own_lease([start_spec], placements)
    spec = start_spec.spec

    def prepare() -> None:
        # The new run uses the key of the old run, because the snapshot is signed with it.
        remember_launch(spec, *placements.options_to_note())
        for totals in extensions:
            order_policy(DecisionLog(run.store, spec.run_id, key=spec.key), totals=totals)

    started = start_attempts(
        StartPlan(
            store=run.store,
            backend=placements,
            orders=[start_spec],
            lease=new_lease(run.store, spec),
            prepare=prepare,
            undo=lambda error, _: abandon_run(run.store, spec.run_id, spec.world_size, error),
        ),
        on_progress,
    )
    begun = Run(run.store, spec.run_id, executor=placements)
    if not spec.settings.detach:
        manager_of(begun).restart_here([start_spec], started.lease)
        manager_of(begun).notify_here(spec)
    return begun


def _check_backends(run: RunView, chosen: Collection[int]) -> None:
    """Check that each backend that must start replicas is installed.

    Otherwise, replicas on other backends would be started and then ended.

    Raises:
        BackendError: one of these backends is not installed on this machine.
    """
    missing: dict[int, BackendError] = {}
    for placed in {run.placements.at(rank): None for rank in chosen} if len(run.placements.placed) > 1 else ():
        try:
            check_single_ranks(placed.backend)
        except BackendError as error:
            missing |= {rank: error for rank in chosen if rank in placed.placement.ranks}
    if not missing:
        return
    others = [rank for rank in chosen if rank not in missing]
    advice = ""
    if others:
        option = name_ranks(others).partition(" ")[2].replace(" ", "")
        name = reference(run.run_id, run.store.url)
        advice = f" Resume what this machine can start: replicas resume {name} --rank {option}, or ranks=."
    raise BackendError(
        f"{name_ranks(missing).capitalize()} of run {run.run_id!r} cannot be started here, and nothing was. "
        f"{next(iter(missing.values()))}{advice}"
    )


def _next_attempts(
    run: RunView, ranks: Sequence[int] | None, startable: Collection[int], *, is_extended: bool = False
) -> dict[int, int]:
    """Choose the ranks to resume, and return the number of the next attempt of each rank.

    In an extended run, ranks that have succeeded are started again, too, and all ranks may still run.

    The number follows the attempt whose end was seen. If numbers were read later, two processes that resume at the same
    time would get different numbers and start two copies.
    """
    states = {state.rank: state for state in run.status().replicas}
    for state in states.values() if ranks is None else ():
        if not state.is_readable and state.outcome is not None:
            raise CorruptObjectError(str(state.outcome.error), url=run.store.url)
    for rank in ranks or ():
        if rank not in states:
            raise RunNotFoundError(f"Run {run.run_id!r} has no rank {rank}, but {name_ranks(states)}.")
        if not (states[rank].status.is_terminal or states[rank].restart.is_awaited):
            raise ValueError(
                f"Rank {rank} of run {run.run_id!r} is {states[rank].status}; only ranks that have ended are resumed."
            )
    ended = [s for s in states.values() if s.status.is_terminal or s.restart.is_awaited]
    done = () if is_extended else (ReplicaStatus.SUCCEEDED,)
    asked = [s for s in ended if (s.status not in done if ranks is None else s.rank in ranks)]
    if foreign := [s.rank for s in asked if s.rank not in startable]:
        names, where = name_ranks(foreign), ", ".join(sorted({states[rank].backend for rank in foreign}))
        text = f"{names} on {where} {'was' if len(foreign) == 1 else 'were'} added by another machine"
        print(f"replicas: {text}. To start added replicas here, name them: --rank.", file=sys.stderr)
        asked = [s for s in asked if s.rank not in foreign]
    resumed = {s.rank: s.attempt + 1 for s in asked if s.restart.is_awaited and _decided(s)["kind"] == "resume"}
    found = {state.rank: state.attempt + 1 for state in asked if state.rank not in resumed}
    if not found and resumed:
        rank, attempt = next(iter(resumed.items()))
        by = f"ordered by {_name(_decided(states[rank]).get('by'))}"
        raise AlreadyResumedError(_being_resumed(run, list(resumed), attempt, by))
    if not found and not (is_extended and not asked):
        status, name = run.status(), reference(run.run_id, run.store.url)
        advice = ""
        if status.is_terminal:
            advice = (
                f" To train it further: replicas resume {name} --total-steps N. To begin a new run from its model: "
                f"replicas launch … --from {name}"
            )
        raise ValueError(f"Run {run.run_id!r} has no replica to resume: {status.counts}.{advice}")
    return found


def _decided(state: ReplicaState) -> Mapping[str, Any]:
    return {"kind": None, **(state.restart.decision or {})}


def _who_resumes(run: RunView, overtaken: Mapping[int, int], but: str | None = None) -> str:
    """Return a sentence that names the process that has claimed attempts which this process wanted to start."""
    by_whom: dict[tuple[int, str], list[int]] = {}
    for rank, attempt in overtaken.items():
        by = None
        with contextlib.suppress(CorruptObjectError):
            by = Attempt(run.store, run.run_id, rank, attempt).started_by()
        if (who := _name(by)) != but:
            by_whom.setdefault((attempt, who), []).append(rank)
    return " ".join(_being_resumed(run, ranks, attempt, f"begun by {who}") for (attempt, who), ranks in by_whom.items())


def _being_resumed(run: RunView, ranks: Sequence[int], attempt: int, by: str) -> str:
    subject = f"{name_ranks(ranks).capitalize()} of run {run.run_id!r} {'is' if len(ranks) == 1 else 'are'}"
    return f"{subject} being resumed by another process (attempt {attempt}, {by})."


def _name(by: Any) -> str:
    """Return the name of a process in a record as readable text."""
    if not isinstance(by, str) or not 0 < len(by) <= MAX_NAME:
        return "an unnamed process"
    return by if by.isprintable() else repr(by)
