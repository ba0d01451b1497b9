"""The verb `events`, which lists the events of a run: launches, failures, restarts and others."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from executors.cli.options import BackendOptions, ExecutorOption, RendezvousOption, RunArgument, find_run
from executors.cli.output import Output, json_guard, name_duration, note, one_line, versioned
from executors.cli.verb_help import describe
from executors.view.report.event_reader import Event

AS_JSON = "Print one line of JSON for each event."
STYLES = {
    "ended": "red", "hang_suspected": "yellow", "notice": "yellow", "works_again": "green", "warning": "yellow",
    "cancelled": "yellow", "gave_up": "bold red", "stopped": "bold red", "decided": "cyan",
    "rule_broken": "yellow",
}  # fmt: skip
# events of these kinds have a complete sentence as text
WITH_FULL_TEXT = ("decided", "works_again", "cancelled", "gave_up", "stopped")


@describe(examples=["replicas events RUN", "replicas events RUN --follow --json"])
def events(
    run: RunArgument,
    follow: Annotated[bool, Option("--follow", "-f", help="Continue with new events until the run ends.")] = False,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: BackendOptions = None,
    as_json: Annotated[bool, Option("--json", help=AS_JSON)] = False,
) -> int:
    """List the events of a run: starts, warnings, hangs, ends, restarts."""
    from executors.run.run import view_of

    found = find_run(run, rendezvous, backend, option)
    output, began_at = Output(), view_of(found).record.created_at
    json_guard.has_document = as_json  # each line is a complete JSON document, so a failure must not add another one
    for event in found.events(follow, note):
        if as_json:
            print(output.line(versioned(event.to_json())), flush=follow)
            continue
        is_well = event.reason == "succeeded"
        output.print(line_of_event(event, began_at), "green" if is_well else STYLES.get(event.kind))
        if follow:
            output.console.file.flush()
    return 0


def line_of_event(event: Event, began_at: float) -> str:
    """Return an event as a line: `[  0:42] rank 3 ended after 38 s (attempt 1): signal: was ended by signal 9`.

    Args:
        event: the event.
        began_at: the Unix time of the launch. The line begins with the time since then.

    Example:
        line_of_event(event, run.record.created_at)
    """
    elapsed = f"[{name_duration(max(0.0, event.at - began_at)):>7}]"
    if event.kind in WITH_FULL_TEXT:
        return f"{elapsed} {one_line(event.why)}"
    subject = "the run" if event.rank is None else f"rank {event.rank}"
    took = "" if event.duration_s is None else f" after {name_duration(event.duration_s)}"
    which = f" (attempt {event.attempt})" if event.attempt else ""
    by = f" by {event.actor}" if event.kind in ("launched", "claimed") and event.actor else ""
    more = ": ".join(filter(None, (event.reason, event.why)))
    more += f" ({event.count} times)" if event.count > 1 else ""
    return one_line(f"{elapsed} {subject} {event.kind.replace('_', ' ')}{took}{which}{by}{': ' if more else ''}{more}")
