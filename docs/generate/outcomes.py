"""Makes the pages of errors, outcomes and exit codes: what each means, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import griffe

from docs.generate.api import Module, docstring_of, parts_of
from docs.generate.markdown import code, table

REASONS: Mapping[str, tuple[str, str, str]] = {
    "exception": (
        "failed",
        "The user's function raised an exception. The outcome holds its traceback.",
        "Read the traceback: `replicas logs RUN --rank R`. `--restarts` starts the rank again.",
    ),
    "hang": (
        "failed",
        "The replica made no progress within its limit. The stacks of its threads are kept.",
        "Read the stacks: `replicas logs RUN --rank R --stacks`. Mark long work with `replica.section(…)` or "
        "`replica.progress()`, or give a longer `--hang-timeout`.",
    ),
    "rule": (
        "failed",
        "A rule of the run with the action `restart` was broken (`--rule`). The message has the rule and the value.",
        "`--restarts` starts the rank again, at most N times with `rule=N`. Look at `replicas events RUN`.",
    ),
    "timeout": (
        "failed",
        "The replica reached its `--timeout`, or the time limit of its service.",
        "`replicas resume RUN --timeout 4h` continues from the newest snapshot with a new limit.",
    ),
    "signal": (
        "failed",
        "A signal that `replicas` did not send ended the process, such as SIGSEGV or SIGKILL.",
        "Look at the end of the log. After a SIGKILL, look at the memory that the replica used: `replicas report RUN`.",
    ),
    "oom": (
        "failed",
        "The kernel or the service ended the process because memory was full.",
        "Use a smaller batch, or ask the backend for more memory. `--restarts` starts the rank again once.",
    ),
    "lost": (
        "failed",
        "The replica and its supervisor vanished together, without a record.",
        "Look at the machine or at the service's own log. `replicas resume RUN` starts the rank again.",
    ),
    "preempted": (
        "failed",
        "The service took the machine back.",
        "The rank starts again while a process watches the run. This restart is not counted. After `--detach`, "
        "it needs `--restarts`, or `replicas watch RUN --restarts preempted`.",
    ),
    "fenced": (
        "failed",
        "A newer attempt of this rank has taken over, so this attempt was ended. It does not count as a failure.",
        "Nothing: the newer attempt continues.",
    ),
    "no_result": (
        "failed",
        "The process ended by itself before it recorded a result, for example by `sys.exit(3)` or `os._exit`. The "
        "message tells if the store could not be reached.",
        "Return from the function instead, or call `sys.exit(0)`. Look at the end of the log.",
    ),
    "result_not_serializable": (
        "failed",
        "The function returned a value that is not JSON.",
        "Return numbers, texts, lists and dicts. Save everything else with `replica.save_artifact(…)`.",
    ),
    "cancelled": (
        "cancelled",
        "The run, or this rank, was cancelled.",
        "`replicas resume RUN` starts it again from the newest snapshot.",
    ),
    "stopped": (
        "cancelled",
        "`replicas stop` ended the replica after its next round. It kept everything up to that round.",
        "`replicas resume RUN` continues.",
    ),
    "start_failed": (
        "failed",
        "The backend could not start the replica, it has no GPU that PyTorch can use, or `--health-check` failed.",
        "The outcome has the service's own words. `replicas doctor --backend NAME` checks the usual causes.",
    ),
}
"""For each reason: the status that goes with it, its cause, and what to do."""

EXIT_CODES: Mapping[int, tuple[str, str]] = {
    0: (
        "All replicas succeeded, or M of them with `--min-replicas M`. Ranks that `replicas cancel --rank` ended do "
        "not count if others succeeded.",
        "",
    ),
    1: (
        "A replica failed or was lost. Or the command could not do its work, for example because a disk is full.",
        "Read the last lines of the output.",
    ),
    2: (
        "An option or a value is wrong, there is no such run, or a verb refused its work.",
        "Read the message. `launch` and `resume` have started nothing.",
    ),
    93: (
        "The run was given up or stopped, and starting it again unchanged does not help.",
        "Mend the cause before you start the run again.",
    ),
    124: (
        "Replicas failed only by their time limits. Or `--timeout` of `wait` or `collect` ended the wait.",
        "`replicas resume RUN --timeout 4h`, or wait again.",
    ),
    130: (
        "The run was cancelled, by Ctrl-C or by another process. A run whose replicas ended because a peer failed "
        "has 1 instead.",
        "`replicas resume RUN` starts it again.",
    ),
}
"""For each exit code of the command: what it means, and what to do."""


def outcomes_page() -> str:
    """Return the page of the reasons in outcomes."""
    rows = [[code(reason), status, cause, remedy] for reason, (status, cause, remedy) in REASONS.items()]
    return (
        "# Outcomes\n\nAn attempt that ended has an *outcome*: its status, and for an end that is not a success its "
        "reason. `replicas status RUN` shows both, and `replicas events RUN` shows when and why.\n\n"
        + table(("reason", "status", "cause", "what to do"), rows)
        + "\n"
    )


def exit_codes_page() -> str:
    """Return the page of the command's exit codes."""
    rows = [[code(str(number)), meaning, remedy] for number, (meaning, remedy) in EXIT_CODES.items()]
    return (
        "# Exit codes\n\nThe exit code of `replicas launch`, `wait`, `watch`, `resume`, `add`, `stop` and `collect` "
        "shows how the run ended. If several lines apply, 130 comes first, then 93, 1 and 124. `watch --once` exits "
        "with 0 after its pass. `status --check` exits with 1 if a rank may hang, waits for a restart, or was given "
        "up. The "
        "help of each verb lists its own codes.\n\n" + table(("code", "meaning", "what to do"), rows) + "\n"
    )


def errors_page() -> str:
    """Return the page of the errors that the two packages raise."""
    blocks = [
        "# Errors",
        "Every error is a `ReplicasError`. Import the errors from `executors.errors` and `diloco.errors`. "
        "A message names the value that is wrong and what to do.",
    ]
    for module in ("executors.errors", "diloco.errors"):
        blocks.append(f"## `{module}`")
        for part in parts_of(Module(module, has_only_errors=True)):
            blocks += [f"({part.path})=\n### `{part.name}`", *_text_of(part.definition)]
    return "\n\n".join(blocks) + "\n"


def _text_of(error: griffe.Object) -> Iterator[str]:
    bases = ", ".join(code(str(base).rpartition(".")[2]) for base in getattr(error, "bases", ()))
    for section in docstring_of(error):
        if section.kind.value == "text":
            yield section.value
        elif section.kind.value == "admonition" and section.value.kind in ("example", "examples"):
            yield f"```python\n{section.value.contents.strip()}\n```"
        elif section.kind.value in ("attributes", "parameters"):
            rows = [[code(each.name), " ".join(each.description.split())] for each in section.value]
            yield table(("attribute", "meaning"), rows)
    yield f"It is also: {bases}."
