"""What several verbs take: the run, the rendezvous, `--json`; and from `k=v` texts to values."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from executors.protocol import ServerlessExecutor
    from executors.run import Run


def _complete_run(incomplete: str) -> list[str]:
    from executors.state import known_run_ids

    return [run_id for run_id in known_run_ids() if run_id.startswith(incomplete)]


RunArgument = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run id, or URL/RUN_ID.", autocompletion=_complete_run, show_default=False),
]
RunArguments = Annotated[
    list[str],
    typer.Argument(metavar="RUN…", help="Run ids, or URL/RUN_ID.", autocompletion=_complete_run, show_default=False),
]
RendezvousOption = Annotated[
    str | None,
    typer.Option(
        "--rendezvous",
        metavar="URL",
        help="The store that holds the run: a directory, or a url. Default: this user's own.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document; progress goes to stderr.")]
BackendOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="K=V",
        help="An option of the backend; see `replicas backends`. Repeatable.",
        show_default=False,
    ),
]
EnvOption = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        "-e",
        metavar="K=V",
        help="A variable for the replicas; never recorded. Repeatable.",
        show_default=False,
    ),
]
SecretOption = Annotated[
    list[str] | None,
    typer.Option("--secret", metavar="NAME", help="A secret, by its name. Repeatable.", show_default=False),
]
ExecutorOption = Annotated[
    str | None,
    typer.Option(
        "--backend",
        "-b",
        metavar="NAME",
        help="What the run was launched with: a backend's name, or pkg.mod:Class, which is never taken from a record.",
    ),
]
ExecutorOptions = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="K=V", help="An option of that --backend. Repeatable.", show_default=False),
]
TimeoutOption = Annotated[
    float | None,
    typer.Option("--timeout", metavar="S", help="Wait at most this many seconds; then exit with 124."),
]


def find_run(run: str, rendezvous: str | None, backend: str | None = None, options: Sequence[str] | None = None) -> Run:
    """Find the run a user names, with the executor that the user names, if any.

    Raises:
        typer.BadParameter: it is no run id, or an option is wrong.
        RunNotFoundError: there is no such run.
        BackendError: the run is of another backend.
    """
    from executors.known_runs import attach

    try:
        return attach(run, rendezvous=rendezvous, executor=_named_executor(backend, options))
    except (ValueError, TypeError) as error:
        refuse(error)


def _named_executor(backend: str | None, options: Sequence[str] | None) -> str | ServerlessExecutor | None:
    if not options:
        return backend
    if backend is None:
        refuse("--option belongs to a backend: give --backend, too.")
    from executors.cli.backend_options import check_options
    from executors.registry import executor_class, get_executor

    values = parse_values("--option", options)
    check_options(backend, executor_class(backend), values)
    return get_executor(backend, values)


def refuse(error: Exception | str) -> NoReturn:
    """End with a usage error: `Error: …` on stderr, exit code 2."""
    raise UsageProblem(str(error))


class UsageProblem(typer.BadParameter):
    """A mistake of the user, told in one sentence."""

    def format_message(self) -> str:
        return str(self.message)


def parse_values(option: str, texts: Sequence[str] | None) -> dict[str, Any]:
    """Read `k=v` texts; a value is JSON when it parses as JSON, else a string.

    Raises:
        UsageProblem: a text has another form.
    """
    values = {}
    for name, text in parse_texts(option, texts).items():
        try:
            values[name] = json.loads(text, parse_constant=_no_number)
        except ValueError:
            values[name] = text
        if text in ("True", "False", "None"):
            written = {"True": "true", "False": "false", "None": "null"}[text]
            print(f"Note: {option} {name}={text} is a string; JSON writes {name}={written}.", file=sys.stderr)
    return values


def parse_texts(option: str, texts: Sequence[str] | None) -> dict[str, str]:
    """Read `k=v` texts, the values as they are."""
    values = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            refuse(f"{option} {text!r}: the form is {option} NAME=VALUE, as in {_EXAMPLES.get(option, 'NAME=VALUE')}.")
        if name.strip() in values:
            refuse(f"{option} {name.strip()} is given twice.")
        values[name.strip()] = value
    return values


_EXAMPLES = {
    "--arg": "--arg steps=500 or --arg 'sizes=[64, 128]'",
    "--env": "--env OMP_NUM_THREADS=1",
    "--option": "--option max_parallel=2",
}


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
