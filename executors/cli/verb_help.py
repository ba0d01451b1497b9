"""Formats the help of the command: options in panels, then examples, then the exit codes as a list.

Typer prints the panels. This file adds what Typer lacks: examples that stay on one line each, so that users can copy
them, and the list of exit codes at the end.
"""

from __future__ import annotations

import copy
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from typer.core import TyperCommand, TyperGroup

from executors.cli.output import CANCELLED, FAILED, PERMANENT, TIMED_OUT, USAGE
from executors.settings.declaration import SETTINGS

Verb = TypeVar("Verb", bound=Callable[..., Any])
MEANING_AT = 8  # the column at which the meaning of an exit code begins

EXIT_CODES: Mapping[int, str] = {
    0: "All replicas succeeded, or at least the number that --min-replicas names.",
    FAILED: "A replica failed, or the command could not do its work.",
    USAGE: "The command line is wrong. Nothing was started.",
    PERMANENT: "The run was given up or stopped. Starting it again unchanged does not help.",
    TIMED_OUT: "Replicas reached a time limit, and nothing else failed.",
    CANCELLED: "The run was cancelled, for example with Ctrl-C.",
}
"""The exit codes of each verb that ends when a run ends. If several apply, 130 wins, then 93, 1 and 124."""


def describe(*, examples: Sequence[str] = (), exit_codes: Mapping[int, str] | None = None) -> Callable[[Verb], Verb]:
    """Return a decorator that adds examples and exit codes to the help of a verb.

    Args:
        examples: complete command lines. Each is one line of the help.
        exit_codes: the exit codes of the verb with their meanings. None: the help has no list of exit codes.

    Example:
        @describe(examples=["replicas ls --last 5"])
        def ls(last: int = 30) -> int: ...
    """

    def decorate(verb: Verb) -> Verb:
        verb.examples, verb.exit_codes = tuple(examples), dict(exit_codes or {})  # type: ignore[attr-defined]
        return verb

    return decorate


class VerbCommand(TyperCommand):
    """A verb of the command. Its help ends with examples and exit codes."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the arguments and options of the verb, adapted for its help."""
        parameters = _without_types(super().get_params(ctx))
        if self.name == "launch":
            # All other options are in panels. Without this, --help would be in a separate panel, above all others.
            for each in parameters:
                if each.name == "help":
                    each.rich_help_panel = SETTINGS
        return parameters

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the line `Usage: …`. Typer writes a required argument as {RUN}, and man pages as RUN."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        super().format_help(ctx, formatter)
        print_end_of_help(getattr(self.callback, "examples", ()), getattr(self.callback, "exit_codes", {}))


class VerbGroup(TyperGroup):
    """The command `replicas`.

    If the user gives a verb of another tool, its error names the verb with the same meaning.
    """

    synonyms: Mapping[str, str] = {}
    examples: Sequence[str] = ()

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options of the command, adapted for its help."""
        return _without_types(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the verb that the command line names.

        For a verb of another tool, raise an error that names the verb of `replicas`.
        """
        if args and args[0] in self.synonyms:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {self.synonyms[args[0]]!r}?")
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        super().format_help(ctx, formatter)
        print_end_of_help(self.examples, {})


def _without_types(parameters: list[Any]) -> list[Any]:
    """Return the parameters, changed so that the help shows no `<bool>` for a flag and no `<str>` for an argument."""
    for each in parameters:
        if getattr(each, "is_flag", False):
            each.metavar = ""
        elif each.param_type_name == "argument":
            each.type = copy.copy(each.type)  # copy it first, because other verbs share the same type object
            each.type.get_metavar = lambda *_, **__: ""
    return parameters


def text_of_help(verb: Callable[..., Any]) -> str:
    """Return the docstring of a verb with one line for each paragraph, so that the terminal breaks the lines.

    Args:
        verb: the function.

    Example:
        text_of_help(launch)
    """
    paragraphs = (inspect.getdoc(verb) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def print_end_of_help(examples: Sequence[str], exit_codes: Mapping[int, str]) -> None:
    """Print the examples and the exit codes of a verb.

    Args:
        examples: complete command lines. A line that is longer than the terminal is continued with a backslash, so
            that it can still be copied.
        exit_codes: the exit codes with their meanings.

    Example:
        print_end_of_help(["replicas ls --last 5"], {0: "The runs were listed."})
    """
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if examples:
        console.print(" Examples", style="bold")
        for example in examples:
            for line in wrap_command(example, console.width - 3):
                console.print(f"   {line}", soft_wrap=True)
        console.print()
    if exit_codes:
        console.print(" Exit codes", style="bold")
        for code, meaning in exit_codes.items():
            first, *rest = textwrap.wrap(meaning, max(20, console.width - MEANING_AT - 1))
            console.print(f"[bold cyan]{code:>6}[/]  {first}", markup=True, soft_wrap=True)
            for line in rest:
                console.print(" " * MEANING_AT + line, soft_wrap=True)
        console.print()


def wrap_command(command: str, width: int) -> list[str]:
    """Return a command line in lines that a shell reads as one.

    Args:
        command: a command line. It is broken before an option only.
        width: the longest line, in characters. A single option may be longer.

    Example:
        wrap_command("replicas launch train.py --n 4 --arg steps=500", 40)
    """
    first, *options = re.split(r" (?=-)", command)
    lines = [first]
    for part in options:
        if len(lines[-1]) + 1 + len(part) + 2 <= width:
            lines[-1] += f" {part}"
        else:
            lines[-1] += " \\"
            lines.append(f"  {part}")
    return lines
