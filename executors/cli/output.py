"""Prints the output of the command: text, JSON documents, notes and usage errors. It also defines the exit codes."""

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

from executors.cli.documents import VERSION, ErrorDocument
from executors.errors import ReplicasError
from executors.settings.durations import name_duration as name_duration
from executors.status import name_ranks as name_ranks
from executors.view.report.text import MAX_CHARACTERS as MAX_CHARACTERS
from executors.view.report.text import inert as inert
from executors.view.report.text import name_age as name_age
from executors.view.report.text import one_line as one_line

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

T = TypeVar("T")
FAILED, USAGE, PERMANENT, TIMED_OUT, CANCELLED = 1, 2, 93, 124, 130  # exit codes
CLOSED_PIPE = 141  # the exit code of a program that SIGPIPE ended
WRONG_PATH = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP, errno.ENOTEMPTY),
)
"""The errors that the user can avoid with another path, or with more rights to the path."""
UNUSUAL = re.compile(r"[^\n -~]")
PROGRESS_EVERY_S = 10.0  # the interval, in seconds, of plain lines of progress
QUIET_S = 2.0  # seconds; a launch that starts faster prints no line of progress
WIDE = 10_000  # characters of a line on a terminal; output for another program is never cut

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document. Progress goes to stderr.")]


class JsonGuard:
    """Makes sure that a call with --json prints exactly one JSON document, also if its verb fails."""

    as_json = False
    has_document = False

    def begin(self, *, as_json: bool) -> None:
        """Begin a call, and forget the previous one, because tests make several calls in one process.

        Args:
            as_json: True if the call must print a JSON document.
        """
        self.as_json, self.has_document = as_json, False

    def print_failure(self, value: ErrorDocument) -> None:
        """Print the JSON document of a failed call, unless the call printed a document or needs none.

        Args:
            value: the document.
        """
        if self.as_json and not self.has_document:
            self.has_document = True
            print(json.dumps(versioned(value)))


json_guard = JsonGuard()


class Output:
    """The output of one verb. With `as_json` stdout has exactly one document, and all text goes to stderr.

    Args:
        as_json: True if the verb prints a JSON document.

    Example:
        Output().print("No runs.", "dim")
    """

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json

    @cached_property
    def console(self) -> Console:
        """A console that prints text unchanged: without markup, emoji and guessed colors."""
        from rich.console import Console

        width = None if (sys.stderr if self.as_json else sys.stdout).isatty() else WIDE
        return Console(stderr=self.as_json, markup=False, emoji=False, highlight=False, width=width)

    @property
    def is_live(self) -> bool:
        """True if the output is a terminal that can redraw lines."""
        return self.console.file.isatty() and self.console.is_terminal and not self.console.is_dumb_terminal

    def print(self, text: RenderableType = "", style: str | None = None, *, wrap: bool = False) -> None:
        """Print text or a table.

        Args:
            text: the text or table.
            style: a style of rich, such as "red". None: no style.
            wrap: True to break long lines at words. False: the terminal breaks them, so a command can be copied whole.
        """
        if isinstance(text, str):
            text = inert(text)
        if isinstance(text, str) or self.console.file.isatty():
            self.console.print(text, style=style, soft_wrap=isinstance(text, str) and not wrap)
            return
        with self.console.capture() as captured:
            self.console.print(text, style=style)
        lines = captured.get().splitlines()  # rich fills the last column with blanks
        print(*(line.rstrip() for line in lines), sep="\n", file=self.console.file)

    @contextlib.contextmanager
    def busy(self, text: str) -> Iterator[Callable[[str], None]]:
        """Show that the block still runs: on a terminal by a line that counts seconds, elsewhere by plain lines.

        Args:
            text: the line.

        Yields:
            A function that takes a few words about the progress, which the line then shows.
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

    def document(self, value: Mapping[str, Any]) -> None:
        """Print the JSON document of the verb, with the version of the documents.

        Args:
            value: the document, of a type in `executors.cli.documents`. Numbers that JSON does not have become null,
                and `notes` name them.
        """
        json_guard.has_document = True
        value = finite(value)
        self.print_notes(value)
        print(strict_json(versioned(value), encoding=sys.stdout.encoding))

    def line(self, value: Any) -> str:
        """Return a JSON value on one line, in the encoding of this output.

        Args:
            value: the value.
        """
        return strict_json(value, indent=None, encoding=self.console.encoding)

    def print_notes(self, document: Mapping[str, Any]) -> None:
        """Print one line on stderr about the numbers that `finite` has replaced in a document.

        Args:
            document: the document.
        """
        if notes := document.get("notes"):
            more = f" And {len(notes) - 1} more." if len(notes) > 1 else ""
            note(f"{notes[0]}{more}")


class _LossyStream:
    """A stream that drops text after an error of writing. A closed pipe still raises its error."""

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
    """Drop lines that cannot be written within the block, as on a full disk.

    Some runs end with the process that watches them. So that process must not end because its log is on a full disk.
    One note on stderr reports the loss. Writes after the block fail as usual.
    """
    errors: list[OSError] = []

    def on_error(error: OSError) -> None:
        if not errors:  # one note is enough; stderr may be on the same full disk
            errors.append(error)
            note(f"Lines of output are lost, because they cannot be written ({error.strerror}). The run continues.")

    dropping: list[Any] = [_LossyStream(stream, on_error) for stream in (sys.stdout, sys.stderr)]
    with contextlib.redirect_stdout(dropping[0]), contextlib.redirect_stderr(dropping[1]):
        yield


def note(text: str) -> None:
    """Print a note on stderr. A note is neither an error nor a part of the requested output.

    Args:
        text: the note.
    """
    print(inert(f"Note: {text}"), file=sys.stderr, flush=True)


def versioned(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with the version of the documents as its first field.

    Args:
        document: the document.

    Example:
        versioned({"runs": []})  # {"version": 1, "runs": []}
    """
    return {"version": VERSION, **document}


def finite(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document in which null replaces each number that JSON cannot represent. Its field `notes` names the
    places.

    Args:
        document: the document.

    Example:
        finite({"loss": math.nan})["notes"]
    """
    notes = list(document.get("notes", ()))
    copied = _finite(dict(document), "", notes)
    return {**copied, "notes": notes} if notes else copied


def _finite(value: Any, place: str, notes: list[str]) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each, f"{place}.{key}" if place else str(key), notes) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each, f"{place}[{number}]", notes) for number, each in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        notes.append(f"{place} is null in this document, because JSON has no {value}.")
        return None
    return value


def strict_json(value: Any, *, indent: int | None = 1, encoding: str | None = None) -> str:
    """Return JSON that every parser accepts. Characters are written unchanged if the encoding has all of them.

    Args:
        value: the value.
        indent: the number of blanks per level. None: one line.
        encoding: the encoding of the output. None: UTF-8.

    Example:
        strict_json({"loss": 0.5}, indent=None)
    """
    value = _finite(value, "", [])
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    text = UNUSUAL.sub(lambda found: found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1], text)
    try:
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent)
    return text


def name_limit(timeout_s: float | None) -> str:
    """Return a time limit as text: `no time limit` or `time limit 1:30`.

    Args:
        timeout_s: the limit in seconds. None: no limit.
    """
    if timeout_s is None:
        return "no time limit"
    return f"time limit {timeout_s:g} s" if timeout_s < 60 else f"time limit {name_duration(timeout_s)}"


class UsageProblem(typer.BadParameter):
    """A mistake in the command line. Its message has the value and the remedy."""

    def format_message(self) -> str:
        """Return the message. If a parser of an option raised it, the name of the option comes first."""
        option = self.param.opts[0] if self.param is not None else ""
        return f"{option} {self.message}".lstrip()


def refuse(error: Exception | str) -> NoReturn:
    """End the command with a usage error: print `Error: …` on stderr, and exit with code 2.

    Args:
        error: the message, or the error that has it.

    Raises:
        UsageProblem: always.
    """
    raise UsageProblem(str(error))


def raise_write_error(path: Path | str, error: OSError) -> NoReturn:
    """End the command because a file could not be written.

    Args:
        path: the file or folder.
        error: the error of the system.

    Raises:
        UsageProblem: the path is the problem, and another one would work. The exit code is 2.
        OSError: the machine has a problem, such as a full disk. The exit code is 1.
    """
    text = f"Cannot write to {str(path)!r}: {error.strerror}."
    if error.errno in WRONG_PATH:
        refuse(text)
    raise OSError(text) from error


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turn an error about a wrong argument within the block into a usage error."""
    try:
        yield
    # some of these errors are also a TypeError or ImportError; `main` prints them as what they are
    except ReplicasError:
        raise
    except (ValueError, TypeError, ImportError) as error:
        problem = UsageProblem(str(error))
        for words in getattr(error, "__notes__", ()):
            problem.add_note(words)
        raise problem from None
