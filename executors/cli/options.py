"""What several verbs take: the run, the rendezvous, `--json`; and from `k=v` texts to values."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
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
TimeoutOption = Annotated[
    float | None,
    typer.Option("--timeout", metavar="S", help="Wait at most this many seconds; then exit with 124."),
]


def find_run(run: str, rendezvous: str | None) -> Run:
    """Find the run a user names.

    Raises:
        typer.BadParameter: it is no run id.
        RunNotFoundError: there is no such run.
    """
    from executors.run import attach

    try:
        return attach(run, rendezvous=rendezvous)
    except (ValueError, TypeError) as error:
        refuse(error)


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
