"""What the command prints, and where; numbers and names for people; usage errors; exit codes."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from executors.errors import ReplicasError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

FAILED, USAGE, TIMED_OUT, CANCELLED = 1, 2, 124, 130  # exit codes
ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?")  # colours, movements; titles, links
MAX_CHARACTERS = 300
WIDE = 10_000  # columns: what another program reads is never cut

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document; progress goes to stderr.")]


class Output:
    """The output of one verb. With `as_json` stdout carries exactly one document, and all else goes to stderr."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json

    @cached_property
    def console(self) -> Console:
        """A console that prints text as it is: no markup, no emoji, no guessing of colours."""
        from rich.console import Console

        file = sys.stderr if self.as_json else sys.stdout
        width = None if file.isatty() else WIDE
        return Console(file=file, markup=False, emoji=False, highlight=False, width=width)

    @property
    def is_live(self) -> bool:
        """Whether the output is a terminal that can redraw."""
        return self.console.file.isatty() and self.console.is_terminal and not self.console.is_dumb_terminal

    def say(self, text: RenderableType = "", style: str | None = None, *, wrap: bool = False) -> None:
        """Print text or a table; long lines are broken only with `wrap`, so that they can be copied whole."""
        if isinstance(text, str):
            text = inert(text)
        if isinstance(text, str) or self.console.file.isatty():
            self.console.print(text, style=style, soft_wrap=isinstance(text, str) and not wrap)
            return
        with self.console.capture() as captured:
            self.console.print(text, style=style)
        lines = captured.get().splitlines()  # without the blanks that fill a table's last column
        print(*(line.rstrip() for line in lines), sep="\n", file=self.console.file)

    def busy(self, text: str) -> AbstractContextManager[object]:
        """On a terminal, show that something is going on within the block."""
        return self.console.status(text) if self.is_live else contextlib.nullcontext()

    def document(self, value: Any) -> None:
        """Print the JSON document."""
        print(strict_json(value))


def strict_json(value: Any) -> str:
    """Return JSON that any reader accepts: a number that is not finite becomes null, as in JavaScript."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda name: None), indent=1)


def inert(text: str) -> str:
    """Return the text without anything that a terminal would obey; its lines stay. A record may hold any text."""
    return "\n".join(_printable(line) for line in text.split("\n"))


def _printable(line: str) -> str:
    return "".join(char if char.isprintable() else " " for char in ESCAPES.sub("", line))


def one_line(text: str, max_characters: int = MAX_CHARACTERS) -> str:
    """Return the text as one line without control characters, cut when it is long."""
    plain = _printable(text).strip()
    return plain if len(plain) <= max_characters else f"{plain[: max_characters - 1]}…"


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks briefly: `rank 3`, `ranks 0-2, 5`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return f"rank{'s' if len(ranks) > 1 else ''} " + ", ".join("-".join(map(str, span)) for span in spans)


def name_limit(timeout_s: float | None) -> str:
    """Name a time limit: `no time limit`, `time limit 1:30`."""
    if timeout_s is None:
        return "no time limit"
    return f"time limit {timeout_s:g} s" if timeout_s < 60 else f"time limit {name_duration(timeout_s)}"


def name_duration(seconds: float) -> str:
    """Write a duration for people: `0.8 s`, `42 s`, `3:05`, `2:10:00`."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def name_age(seconds: float) -> str:
    """Say roughly how long ago something was: `12 s`, `5 min`, `3 h`, `2 d`."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"


class UsageProblem(typer.BadParameter):
    """A mistake of the user, described in one sentence."""

    def format_message(self) -> str:
        option = self.param.opts[0] if self.param is not None else ""  # known where it was found while parsing
        return f"{option} {self.message}".lstrip()


def refuse(error: Exception | str) -> NoReturn:
    """End with a usage error: `Error: …` on stderr, exit code 2."""
    raise UsageProblem(str(error))


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turn what a wrong argument raises within the block into a usage error."""
    try:
        yield
    except ReplicasError:  # also one that is a TypeError or ImportError: `main` shows it, with its own kind
        raise
    except (ValueError, TypeError, ImportError) as error:
        refuse(error)
