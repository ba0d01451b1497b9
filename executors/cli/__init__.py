"""The command `replicas`: launch, watch, collect and cancel runs. Python code can do all of it without the command.

Each verb is a function in one of the modules here, and a call imports the one that it names alone. They import what
they need when they run, so that `replicas --help` stays quick. Exit codes: 0, 1 a replica failed, 2 usage, 124 only
timeouts, 130 cancelled.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from executors.cli.output import CANCELLED, CLOSED_PIPE, FAILED, USAGE, inert, json_guard
from executors.errors import NO_DIRECTORY, LaunchError, ReplicasError, StoreError
from executors.module_search import reserve_names
from executors.patience import waits

VERBS = {
    "launch": "launch", "ls": "runs", "status": "runs", "logs": "logs", "events": "events", "wait": "runs",
    "watch": "watch", "collect": "collect", "model": "model", "report": "report", "export": "export", "stop": "watch",
    "cancel": "runs", "resume": "launch", "add": "add", "rm": "runs", "plan": "plan", "doctor": "doctor",
    "backends": "backends", "config": "config",
}  # fmt: skip
"""In which module here each verb is, in the order of the help."""
SYNONYMS = {
    **dict.fromkeys(("run", "start", "submit", "exec"), "launch"),
    **dict.fromkeys(("ps", "list", "runs"), "ls"),
    **dict.fromkeys(("kill", "end"), "cancel"),
    **dict.fromkeys(("tail", "log", "follow"), "logs"),
    **dict.fromkeys(("history", "happened", "audit"), "events"),
    **dict.fromkeys(("show", "info", "inspect", "top"), "status"),
    **dict.fromkeys(("estimate", "budget"), "plan"),
    "attach": "wait",
    "keep": "watch",
    **dict.fromkeys(("scale", "grow"), "add"),
    **dict.fromkeys(("results", "fetch", "get"), "collect"),
    **dict.fromkeys(("restart", "retry"), "resume"),
    **dict.fromkeys(("weights", "checkpoint", "save"), "model"),
    **dict.fromkeys(("page", "html", "plot"), "report"),
    **dict.fromkeys(("csv", "tensorboard", "dump"), "export"),
    **dict.fromkeys(("remove", "delete", "del"), "rm"),
}
"""What other tools call our verbs."""
FIRST_STEPS = """[bold]First steps[/bold]

replicas launch --n 4

replicas launch train.py:main --n 8 --arg steps=500

replicas logs RUN -f    replicas status RUN    replicas collect RUN --out results"""
HINTS = {
    "-n": ". How many replicas is --n; -n is how many lines.",
    "--arg": ". A run keeps the arguments it was launched with.",
    "-o": ". An option of the backend is --option; -o is the folder of `replicas collect`.",
}
"""What is said of options that a verb does not have."""
GC_THRESHOLD = 20_000
"""Objects between two collections of garbage, of which imports make none: a tenth of the time of a short command."""


class _Verb(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types_of_flags(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if self.name == "launch":
            from executors.cli.config import use_settings

            use_settings(self, ctx, args)
        return super().parse_args(ctx, args)


class _Verbs(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types_of_flags(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in SYNONYMS:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {SYNONYMS[args[0]]!r}?")
        return super().resolve_command(ctx, args)


def _without_types_of_flags(options: list[Any]) -> list[Any]:
    for option in options:
        if getattr(option, "was_given", False):
            option.metavar = ""  # the help would show <bool>
    return options


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"replicas {version('serverless-replicas')}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def command_of(arguments: Sequence[str] = ()) -> Any:
    """Return the command with the verb that these arguments begin with, or with all: importing them takes time."""
    alone = {*VERBS} - {"config"}  # which says what launch takes
    verbs = arguments[:1] if alone & {*arguments[:1]} else VERBS
    app = typer.Typer(
        name="replicas",
        cls=_Verbs,
        no_args_is_help=True,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Launch N ranked replicas on a serverless backend, and watch, collect or cancel them from anywhere.",
        epilog=FIRST_STEPS,
    )
    app.callback()(_options)
    for name in verbs:
        verb = getattr(import_module(f"executors.cli.{VERBS[name]}"), name)
        app.command(cls=_Verb, epilog=getattr(verb, "epilog", None))(verb)
    return typer.main.get_command(app)


def main() -> int:
    """Run the command line and return its exit code. A user's mistake is one line on stderr, never a traceback."""
    json_guard.begin(as_json="--json" in _split_argv(sys.argv[1:])[0])
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # its caller has closed it
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115 - until the end
    try:
        here = os.getcwd()
        reserve_names([here])  # a user's `logging.py` is not for what this command imports
        if not sys.flags.safe_path:
            sys.path.insert(0, here)  # as `python -m` does, so that `train:main` is found there
    except FileNotFoundError:
        return _fail(ReplicasError(NO_DIRECTORY))
    _show_warnings_as_lines()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a log may hold what this terminal cannot show
    try:
        code = _call()
        sys.stdout.flush()
    except (OSError, SystemExit) as error:  # a full disk under stdout is an error, a closed pipe is not a mistake
        is_pipe = any(isinstance(each, BrokenPipeError) for each in (error, error.__context__))  # of click, or rich
        if isinstance(error, SystemExit) and not is_pipe:
            raise
        if not is_pipe:
            with contextlib.suppress(OSError):  # it may be stderr that cannot be written
                print(f"Error: {error}", file=sys.stderr)
            with contextlib.suppress(OSError):  # or stdout
                json_guard.print_failure({"error": str(error), "kind": type(error).__name__})
                sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails as well
        return CLOSED_PIPE if is_pipe else FAILED
    finally:
        try:
            sys.stderr.flush()
        except OSError:  # or the flush at exit would make another exit code of it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    return code


def _call() -> int:
    """Call the verb that the command line names."""
    try:
        arguments, argv = _split_argv(sys.argv[1:])
        if not {*arguments[:1]} & {"launch", "resume", "add"}:  # which may train in this process
            gc.set_threshold(GC_THRESHOLD)
            atexit.register(gc.freeze)  # else all that was imported is looked through once more: a fifth of `status`
        with waits.report_from_thread():  # of a store that does not answer, the first line comes after 5 s
            returned = command_of(arguments).main(arguments, prog_name="replicas", standalone_mode=False, obj=argv)
    except (KeyboardInterrupt, typer.Abort):
        returned = CANCELLED
    except ReplicasError as error:
        code = _fail(error)
        if isinstance(error, LaunchError):  # something was started
            code = CANCELLED if error.cancelled else FAILED
        elif error.was_waited_for or (isinstance(error, StoreError) and error.failing_since is not None):
            code = FAILED  # the command line is right: a store, or a backend, failed for as long as it is waited for
        return code
    except Exception as error:
        if not hasattr(error, "format_message"):  # not one of typer's: a defect, shown with its traceback
            raise
        return _fail(error, error.format_message() + _hint(error, arguments))
    if returned == CANCELLED:
        json_guard.print_failure({"exit_code": CANCELLED, "error": "interrupted"})
    return returned if isinstance(returned, int) else 0


def _hint(error: Exception, arguments: Sequence[str]) -> str:
    """Return what to do about a mistake of the command line, to follow its message; often nothing.

    Args:
        error: typer's.
        arguments: the command line, without what follows `--`.
    """
    option = getattr(error, "option_name", "")
    if option in HINTS or arguments[:1] != ["launch"]:
        return HINTS.get(option, "")
    entrypoint = next((each for each in arguments if each.endswith(".py")), None)
    is_unknown = type(error).__name__ == "NoSuchOption" or "unexpected extra argument" in str(error)
    if entrypoint is None or not is_unknown:
        return ""
    return f" If it is one of {entrypoint}, put it behind --: replicas launch {entrypoint} --n 4 -- {option or '…'} …"


def _split_argv(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """Take what follows `--` off a launch: it is the script's. None: there is no `--`."""
    if arguments[:1] != ["launch"] or "--" not in arguments:
        return arguments, None
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _fail(error: Exception, message: str | None = None) -> int:
    text = "\n  ".join([str(error) if message is None else message, *getattr(error, "__notes__", ())])
    if type(error).__name__ == "NoArgsIsHelpError":
        print(text)  # the help itself
        return USAGE
    with contextlib.suppress(OSError):  # it may be stderr that cannot be written
        print(inert(f"Error: {text}"), file=sys.stderr)
        if (context := getattr(error, "ctx", None)) is not None:
            print(f"Try: {context.command_path} --help", file=sys.stderr)
    json_guard.print_failure({"error": text, "kind": type(error).__name__})
    return USAGE


def _show_warnings_as_lines() -> None:
    import warnings

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if not issubclass(category, (DeprecationWarning, PendingDeprecationWarning)):
            print(inert(f"Warning: {message}"), file=sys.stderr)

    warnings.showwarning = show
