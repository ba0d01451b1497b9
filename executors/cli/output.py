"""What the command prints, and where; numbers and names for people; usage errors; exit codes."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO, TypeVar

import typer

from executors.errors import ReplicasError
from executors.report.words import MAX_CHARACTERS as MAX_CHARACTERS
from executors.report.words import inert as inert
from executors.report.words import name_age as name_age
from executors.report.words import one_line as one_line
from executors.settings.durations import name_duration as name_duration
from executors.status import name_ranks as name_ranks

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

T = TypeVar("T")
FAILED, USAGE, PERMANENT, TIMED_OUT, CANCELLED = 1, 2, 93, 124, 130  # exit codes
CLOSED_PIPE = 141  # as of a program that SIGPIPE ended
WRONG_PATH = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP, errno.ENOTEMPTY),
)
"""Errors of a file that another path, or another right to it, would mend."""
UNUSUAL = re.compile(r"[^\n -~]")
PROGRESS_EVERY_S = 10.0  # between two plain lines of progress
QUIET_S = 2.0  # a launch that has begun by then needs no word before
WIDE = 10_000  # columns: what another program reads is never cut

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document; progress goes to stderr.")]


class JsonGuard:
    """What one call of the command owes who reads its stdout, also where its verb does not come to its end."""

    as_json = False
    has_document = False

    def begin(self, *, as_json: bool) -> None:
        """Forget the call before: tests make several in one process."""
        self.as_json, self.has_document = as_json, False

    def print_failure(self, value: dict[str, Any]) -> None:
        """Print the JSON document of a call that failed, if one is owed: there is exactly one."""
        if self.as_json and not self.has_document:
            self.has_document = True
            print(json.dumps(value))


json_guard = JsonGuard()


class Output:
    """The output of one verb. With `as_json` stdout carries exactly one document, and all else goes to stderr."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json

    @cached_property
    def console(self) -> Console:
        """A console that prints text as it is: no markup, no emoji, no guessing of colours."""
        from rich.console import Console

        width = None if (sys.stderr if self.as_json else sys.stdout).isatty() else WIDE
        return Console(stderr=self.as_json, markup=False, emoji=False, highlight=False, width=width)

    @property
    def is_live(self) -> bool:
        """Whether the output is a terminal that can redraw."""
        return self.console.file.isatty() and self.console.is_terminal and not self.console.is_dumb_terminal

    def print(self, text: RenderableType = "", style: str | None = None, *, wrap: bool = False) -> None:
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

    @contextlib.contextmanager
    def busy(self, text: str) -> Iterator[Callable[[str], None]]:
        """Show within the block that something is going on: a line that counts seconds, elsewhere one after a while.

        Yields: what takes a few words on how far it is, which are shown, too.
        """
        if self.is_live:
            from rich.progress import Progress, SpinnerColumn, TextColumn

            column = TextColumn("{task.description} … {task.elapsed:.0f} s", markup=False)
            with Progress(SpinnerColumn(), column, console=self.console, transient=True) as progress:
                task = progress.add_task(text, total=None)
                yield lambda words: progress.update(task, description=f"{text}: {words}")
            return
        latest, is_over = [text], threading.Event()

        def print_now_and_then() -> None:
            pause_s, printed = QUIET_S, ""
            while not is_over.wait(pause_s):
                if latest[0] != printed:
                    printed = latest[0]
                    print(f"{printed} …", file=sys.stderr, flush=True)
                pause_s = PROGRESS_EVERY_S

        threading.Thread(target=print_now_and_then, name="replicas-busy", daemon=True).start()
        try:
            yield lambda words: latest.__setitem__(0, f"{text}: {words}")
        finally:
            is_over.set()

    def document(self, value: Any) -> None:
        """Print the JSON document."""
        json_guard.has_document = True
        if isinstance(value, dict):
            value = finite(value)
            self.print_notes(value)
        print(strict_json(value, encoding=sys.stdout.encoding))

    def line(self, value: Any) -> str:
        """Return a JSON value on one line, for this output."""
        return strict_json(value, indent=None, encoding=self.console.encoding)

    def print_notes(self, document: Mapping[str, Any]) -> None:
        """Say on stderr, in one line, what `finite` had to change in a document."""
        if notes := document.get("notes"):
            more = f" And {len(notes) - 1} more." if len(notes) > 1 else ""
            note(f"{notes[0]}{more}")


class _LossyStream:
    """A stream that leaves out what cannot be written; its reader's end passes through."""

    def __init__(self, stream: TextIO, on_error: Callable[[OSError], None]) -> None:
        self._stream = stream
        self._on_error = on_error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._attempt(lambda: self._stream.write(text), len(text))

    def flush(self) -> None:
        self._attempt(self._stream.flush, None)

    def _attempt(self, act: Callable[[], T], otherwise: T) -> T:
        try:
            return act()
        except BrokenPipeError:
            raise
        except OSError as error:
            self._on_error(error)
            return otherwise


@contextlib.contextmanager
def without_unwritable_lines() -> Iterator[None]:
    """Leave out within the block what cannot be written, as on a full disk: some runs end with who watches them.

    It is told once, on stderr. What is printed after the block fails as usual.
    """
    errors: list[OSError] = []

    def on_error(error: OSError) -> None:
        if not errors:  # stderr may be on the same disk
            errors.append(error)
            note(f"Lines of output are left out: they cannot be written ({error.strerror}). The run continues.")

    dropping: list[Any] = [_LossyStream(stream, on_error) for stream in (sys.stdout, sys.stderr)]
    with contextlib.redirect_stdout(dropping[0]), contextlib.redirect_stderr(dropping[1]):
        yield


def note(text: str) -> None:
    """Say on stderr what is no error, and no part of what was asked for."""
    print(inert(f"Note: {text}"), file=sys.stderr, flush=True)


def finite(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document with null for each number that JSON lacks; its `notes` say where, if there are any."""
    notes = list(document.get("notes", ()))
    copied = _finite(document, "", notes)
    return {**copied, "notes": notes} if notes else copied


def _finite(value: Any, place: str, notes: list[str]) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each, f"{place}.{key}" if place else str(key), notes) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each, f"{place}[{number}]", notes) for number, each in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        notes.append(f"{place} is null here: it is {value}, which JSON cannot hold.")
        return None
    return value


def strict_json(value: Any, *, indent: int | None = 1, encoding: str | None = None) -> str:
    """Return JSON that any reader accepts, and people read: letters are themselves where the encoding has them all."""
    value = _finite(value, "", [])
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    text = UNUSUAL.sub(lambda found: found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1], text)
    try:
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent)
    return text


def name_limit(timeout_s: float | None) -> str:
    """Name a time limit: `no time limit`, `time limit 1:30`."""
    if timeout_s is None:
        return "no time limit"
    return f"time limit {timeout_s:g} s" if timeout_s < 60 else f"time limit {name_duration(timeout_s)}"


class UsageProblem(typer.BadParameter):
    """A mistake of the user, described in one sentence."""

    def format_message(self) -> str:
        option = self.param.opts[0] if self.param is not None else ""  # known where it was found while parsing
        return f"{option} {self.message}".lstrip()


def refuse(error: Exception | str) -> NoReturn:
    """End with a usage error: `Error: …` on stderr, exit code 2."""
    raise UsageProblem(str(error))


def raise_write_error(path: Path | str, error: OSError) -> NoReturn:
    """End because a file could not be written: a usage error if its path is to blame, else one of this machine.

    Raises:
        OSError: a full disk, say; the command exits with 1.
    """
    text = f"Cannot write to {str(path)!r}: {error.strerror}."
    if error.errno in WRONG_PATH:
        refuse(text)
    raise OSError(text) from error


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turn what a wrong argument raises within the block into a usage error."""
    try:
        yield
    except ReplicasError:  # also one that is a TypeError or ImportError: `main` shows it, with its own kind
        raise
    except (ValueError, TypeError, ImportError) as error:
        problem = UsageProblem(str(error))
        for words in getattr(error, "__notes__", ()):
            problem.add_note(words)
        raise problem from None
