"""The verbs `watch`, which restarts replicas from any machine, and `stop`, which ends a run after a round."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from executors.attempt.pauses import LONGEST_PAUSE_S
from executors.cli.options import (
    BackendOptions,
    DigestOption,
    EnvOption,
    ExecutorOption,
    NotifyOption,
    RendezvousOption,
    RunArgument,
    SecretOption,
    TrustOption,
    VolumeOption,
    find_run,
    notify_urls,
    parse_duration,
    parse_texts,
    setting_option,
)
from executors.cli.output import JsonOption, Output, refuse, usage_errors
from executors.cli.verb_help import EXIT_CODES, describe
from executors.settings.declaration import LIMITS
from executors.settings.durations import name_duration
from executors.settings.notify import ON_HELP, parse_kinds
from executors.settings.policy import HangLimits, Restarts
from executors.status import RunStatus

if TYPE_CHECKING:
    from executors.restarts.decision_log import DecisionLog
    from executors.run.external_controller import ExternalController
    from executors.run.run import Run
    from executors.settings.run_spec import StartSpec

SETTING = re.compile(r"(?:^|,)(restarts|hang|start)=(.*?)(?=,(?:restarts|hang|start)=|$)")
SET = "New rules from now on: restarts=5, restarts=3/1h,oom=0, restarts=none, hang=off or start=20m. Repeatable."
WATCH_RESTARTS = "How often each rank is restarted from now on: N, N/1h, preempted or none. Default: as before."
ONCE = "Make one pass and return, as for cron and CI. The exit code is then 0."
LONGEST_S = 120.0  # seconds; the longest single pass. Later passes make the starts that are due after it
WITHIN = "How long replicas have to finish their round, as in 90s or 5m. Later they are cancelled. Default: 10m."


@describe(
    examples=[
        "replicas watch RUN --restarts 3",
        "replicas watch RUN --once",
        "replicas watch RUN --set hang=2m:3m --set restarts=5",
    ],
    exit_codes=EXIT_CODES,
)
def watch(
    run: RunArgument,
    once: Annotated[bool, Option("--once", help=ONCE)] = False,
    set_: Annotated[list[str] | None, Option("--set", metavar="NAME=VALUE", help=SET, rich_help_panel=LIMITS)] = None,
    restarts: Annotated[str | None, Option(metavar="N,…", help=WATCH_RESTARTS, rich_help_panel=LIMITS)] = None,
    env: EnvOption = None,
    secret: SecretOption = None,
    task_digest: DigestOption = None,
    trust_bucket: TrustOption = False,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: BackendOptions = None,
    volume: VolumeOption = None,
    notify: NotifyOption = None,
    notify_on: Annotated[str | None, setting_option("notify_on", f"{ON_HELP} Default: as launched.")] = None,
    as_json: JsonOption = False,
) -> int:
    """Watch a run, and restart replicas that ended with their machines.

    Any number of processes may watch a run. Ctrl-C stops watching, and the run continues. A detached run is restarted
    only if its launch had --restarts, or if you give them here.
    """
    from executors.cli.live import watch as watch_to_its_end
    from executors.cli.summary import Summary, heading
    from executors.restarts.decision_log import DecisionLog, hang_of
    from executors.restarts.lease import LeaseHolder
    from executors.restarts.orders import order_policy
    from executors.run.run import manager_of, view_of

    output = Output(as_json)
    new_restarts, hang, start = _settings([*(set_ or ()), *([] if restarts is None else [f"restarts={restarts}"])])
    found = find_run(run, rendezvous, backend, option, volume)
    view = view_of(found)
    view.check_not_removed()
    with usage_errors():
        urls = notify_urls(notify)
        if notify_on is not None:
            parse_kinds(notify_on)
        start_specs = _start_specs(found, env, secret, task_digest=task_digest, trust_bucket=trust_bucket)
    start_specs = [start_spec.with_spec(notify=urls) for start_spec in start_specs]
    log = DecisionLog(view.store, found.run_id, key=next((start_spec.spec.key for start_spec in start_specs), None))
    needs_lease = any(start_spec.spec.lease_s is not None for start_spec in start_specs)
    # This command also keeps a run alive that needs a lease, and sends notifications, even if it restarts nothing.
    if not needs_lease and not urls:
        _check_policy(found, log, new_restarts)
    if new_restarts is not None or hang is not None or start is not None:
        limits = None
        if hang is not None or start is not None:
            limits = hang_of(log.read(), start_specs[0].spec.settings.hang_limits).changed(hang, start)
        order_policy(log, new_restarts, limits)
    log.read()
    output.print(heading(found), "bold")
    lease = None
    if needs_lease:
        lease = LeaseHolder(view.store, found.run_id, yields=True)
        lease.start()
    controller = manager_of(found).restart_here(
        start_specs, lease, lambda words: output.print(words, "yellow"), log=log
    )
    if urls:
        spec = start_specs[0].spec
        manager_of(found).notify_here(spec if notify_on is None else spec.with_settings(notify_on=notify_on))
    if once:
        now = _make_one_pass(found, controller, output)
        manager_of(found).stop_notifying()
        if as_json:
            output.document(now.to_json())
        return 0
    try:
        watch_to_its_end(found, output)
    finally:
        manager_of(found).stop_notifying()
        # Record that this command leaves the run on purpose, so that the run continues although no process watches it.
        if lease is not None:
            lease.release()
    return Summary.of(found).finish(output)


@describe(
    examples=["replicas stop RUN", "replicas stop RUN --within 2m"],
    exit_codes={**EXIT_CODES, 0: "No replica failed."},
)
def stop(
    run: RunArgument,
    within: Annotated[
        float, Option("--within", metavar="DURATION", parser=parse_duration, help=WITHIN, show_default=False)
    ] = 600.0,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: BackendOptions = None,
    as_json: JsonOption = False,
) -> int:
    """End each replica of a run after its next round.

    No work is lost. A replica that has not ended in time is cancelled. `replicas resume` continues the run.
    """
    from executors.cli.live import PlainView, follow
    from executors.cli.summary import Summary, reference

    output = Output(as_json)
    found = find_run(run, rendezvous, backend, option)
    now = found.status(reports=False)
    if now.is_terminal:
        output.print(f"Nothing to stop in {found.run_id}: {now.counts}.")
        if as_json:
            output.document(now.to_json())
        return 0
    output.print(
        f"Stopping {found.run_id}. Replicas that have not ended in {name_duration(within)} are cancelled.", "bold"
    )
    view = PlainView(output, found)
    with usage_errors():
        found.stop(within, lambda within_s: follow(found, view, timeout_s=within_s))
    view.update(found.status())
    output.print(f"To continue the run: replicas resume {reference(found)}", "dim")
    return Summary.of(found).finish(output)


def _settings(texts: Sequence[str] | None) -> tuple[Restarts | None, str | None, str | None]:
    """Return the new rules of --set: for restarts, for the time without progress, and for the time of a start."""
    found: dict[str, str] = {}
    for text in texts or ():
        parts = SETTING.findall(text)
        if ",".join(f"{name}={value}" for name, value in parts) != text or not text:
            refuse(f"--set {text!r} is not a rule. Write --set restarts=5, --set hang=off or --set start=20m.")
        found |= dict(parts)
    with usage_errors():
        HangLimits.of(found.get("hang"), found.get("start"))
        return Restarts.of(found.get("restarts")), found.get("hang"), found.get("start")


def _start_specs(
    run: Run, env: Sequence[str] | None, secrets: Sequence[str] | None, *, task_digest: str | None, trust_bucket: bool
) -> list[StartSpec]:
    """Return the specifications from which this machine starts attempts of a run that another process launched.

    Raises:
        ReplicasError: this machine does not trust the task, or has no backend, account or secret of the run.
    """
    from executors.run.run import view_of
    from executors.run.start_spec import resumable_placements, start_specs_of, trusted_task
    from executors.task.launch_request import LaunchRequest

    view = view_of(run)
    task = trusted_task(view, task_digest=task_digest, trust_bucket=trust_bucket)
    placements = resumable_placements(view)
    # Attempts that this command starts on this machine must continue after it ends, because Ctrl-C must not end the
    # run.
    detach = view.record.settings.detach or placements.lease_s is None
    values: Any = {"env": parse_texts("--env", env), "secrets": secrets or ()}
    start_specs = start_specs_of(view, task, **values, detach=detach, verb="watch")
    # Pass any function: the digest has already proven the entrypoint, and this call checks only the account and the
    # secrets.
    for start_spec in start_specs:
        its = placements.some([*{placements.at(rank): None for rank in start_spec.ranks}])
        limits: Any = {"gpu": start_spec.gpu, "timeout": start_spec.timeout_s, "secrets": start_spec.spec.secret_names}
        its.check_launch(LaunchRequest.of(len, n=1, **limits))
    return start_specs


def _check_policy(run: Run, log: DecisionLog, restarts: Restarts | None) -> None:
    """Raise a usage error if a run has no rules for restarts, because the command would do nothing."""
    from executors.cli.summary import reference
    from executors.restarts.decision_log import policy_of
    from executors.run.run import view_of

    if restarts is None and policy_of(log.read(), Restarts.of(view_of(run).record.settings.restarts)) is None:
        refuse(
            f"Run {run.run_id!r} has no --restarts, so `watch` would restart nothing. "
            f"Try: replicas watch {reference(run)} --restarts 3"
        )


def _make_one_pass(run: Run, controller: ExternalController, output: Output) -> RunStatus:
    """Decide about the ended attempts, start those that follow, and return the state of the run after that.

    The function waits for a start that is due within two minutes.
    """
    from executors.cli.live import PlainView

    view, began = PlainView(output, run), time.monotonic()
    while True:
        now = run.status()
        view.update(now)
        wait_s = controller.advance(now.replicas)
        is_over = wait_s is None or time.monotonic() - began > LONGEST_S
        if is_over and not controller.starter.is_busy:
            break
        time.sleep(min(0.2 if wait_s is None else wait_s, LONGEST_PAUSE_S))
    now = run.status()
    view.update(now)
    return now
