"""The command `replicas`: finds the verb that the command line names, runs it, and prints its errors.

Each verb is a function in one of the modules here. A call imports the module of its own verb only, and modules import
what they need when they run, so that `replicas --help` stays quick. Python code can do everything without the command.
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

from executors.cli.output import CANCELLED, CLOSED_PIPE, FAILED, USAGE, UsageProblem, inert, json_guard
from executors.cli.verb_help import VerbCommand, VerbGroup, text_of_help
from executors.errors import NO_DIRECTORY, LaunchError, ReplicasError, StoreError
from executors.module_search import reserve_names
from executors.patience import waits

PANELS = {
    "Start": {"launch": "launch", "resume": "launch", "add": "add"},
    "Look": {
        "ls": "runs",
        "status": "runs",
        "logs": "logs",
        "events": "events",
        "wait": "runs",
        "watch": "watch",
        "dashboard": "dashboard",
    },
    "Results": {"collect": "collect", "model": "model", "report": "report", "export": "export"},
    "End and clean": {"stop": "watch", "cancel": "runs", "rm": "runs"},
    "Settings and checks": {
        "config": "config",
        "backends": "backends",
        "doctor": "doctor",
        "debug": "debug",
        "plan": "plan",
    },
}
"""The verbs by panel of `replicas --help`, each with the module of this package that defines it."""
VERBS = {verb: module for verbs in PANELS.values() for verb, module in verbs.items()}
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
    **dict.fromkeys(("serve", "ui", "web"), "dashboard"),
    **dict.fromkeys(("csv", "tensorboard", "dump"), "export"),
    **dict.fromkeys(("bundle", "bugreport", "support"), "debug"),
    **dict.fromkeys(("remove", "delete", "del"), "rm"),
}
"""Verbs of other tools, each with the verb of `replicas` that does the same."""
FIRST_STEPS = (
    "replicas launch --n 4",
    "replicas launch train.py:main --n 8 --arg steps=500",
    "replicas status RUN",
    "replicas logs RUN --follow",
    "replicas collect RUN --out results",
)
GC_THRESHOLD = 20_000
"""The number of new objects after which Python collects garbage.

It is large, because imports make no garbage, and a short command spent a tenth of its time on collections.
"""


class _Verb(VerbCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line. For `launch`, settings files and the environment give the defaults."""
        if self.name == "launch":
            from executors.cli.config import use_settings

            use_settings(self, ctx, args)
        return super().parse_args(ctx, args)


class _Replicas(VerbGroup):
    synonyms = SYNONYMS
    examples = FIRST_STEPS


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
    """Return the command, with the one verb that a command line names, or with all verbs.

    Args:
        arguments: the command line. Only its first word is read, so that the modules of other verbs are not imported.

    Example:
        command_of(["ls"]).commands["ls"].help
    """
    alone = {*VERBS} - {"config"}  # `config` shows the options of `launch`, so it needs more than its own module
    verbs = arguments[:1] if alone & {*arguments[:1]} else VERBS
    app = typer.Typer(
        name="replicas",
        cls=_Replicas,
        no_args_is_help=True,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Launch N ranked replicas of a training loop on any backend, and follow, collect or cancel them from "
        "anywhere.",
    )
    app.callback()(_options)
    panel_of = {name: panel for panel, names in PANELS.items() for name in names}
    for name in verbs:
        verb = getattr(import_module(f"executors.cli.{VERBS[name]}"), name)
        app.command(cls=_Verb, help=text_of_help(verb), rich_help_panel=panel_of[name])(verb)
    return typer.main.get_command(app)


def main() -> int:
    """Run the command line and return its exit code. A mistake of the user is one line on stderr, never a traceback.

    Example:
        sys.exit(main())
    """
    hide_urls()
    json_guard.begin(as_json="--json" in _split_argv(sys.argv[1:])[0])
    for name in ("stdin", "stdout", "stderr"):
        # A caller may have closed a standard stream: Python then has None, and each print would fail.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115 - until the end
    try:
        here = os.getcwd()
        # A `logging.py` of the user in this folder must not replace the module that this command imports.
        reserve_names([here])
        if not sys.flags.safe_path:
            sys.path.insert(0, here)  # `python -m` does the same, so that `train:main` is found in this folder
    except FileNotFoundError:
        return _fail(ReplicasError(NO_DIRECTORY))
    _show_warnings_as_lines()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a log may contain characters that this terminal cannot show
    try:
        code = _call()
        sys.stdout.flush()
    except (OSError, SystemExit) as error:
        # A full disk below stdout is an error. A pipe that a reader such as `head` has closed is not. Click and rich
        # turn that case into SystemExit.
        is_pipe = any(isinstance(each, BrokenPipeError) for each in (error, error.__context__))
        if isinstance(error, SystemExit) and not is_pipe:
            raise
        if not is_pipe:
            # Either stdout or stderr cannot be written, so each of these two writes may fail again.
            with contextlib.suppress(OSError):
                print(f"Error: {error}", file=sys.stderr)
            with contextlib.suppress(OSError):
                json_guard.print_failure({"error": str(error), "kind": type(error).__name__, "exit_code": FAILED})
                sys.stdout.flush()
        # Python flushes stdout at exit. That would fail again, and change the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE if is_pipe else FAILED
    finally:
        try:
            sys.stderr.flush()
        except OSError:  # Python flushes stderr at exit as well: a failure there would change the exit code
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    return code


def hide_urls() -> None:
    """Replace this process by one whose command line has no URLs of notifications, because all users can list it.

    The URLs move into a variable of the environment, which only this user can read. The process keeps its number.
    """
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if not any(text == "--notify" or text.startswith("--notify=") for text in arguments[:end]):
        return
    from executors.notices.targets import is_reference
    from executors.settings.run_spec import NOTIFY

    urls: list[str] = []
    is_visible = False
    hidden = list(arguments)
    for index, text in enumerate(arguments[:end]):
        flag, equals, value = text.partition("=")
        is_value = index > 0 and arguments[index - 1] == "--notify"
        given = text if is_value else value if flag == "--notify" and equals else ""
        if given and not is_reference(given):
            urls.append(given)
            is_visible = True
            hidden[index] = f"env:{NOTIFY}" if is_value else f"--notify=env:{NOTIFY}"
        elif given == f"env:{NOTIFY}":
            urls += os.environ.get(NOTIFY, "").split()
    start = len(sys.orig_argv) - len(arguments)
    # Within another program, such as a test, the command line is not this command's.
    if not is_visible or sys.orig_argv[start:] != arguments or any(not url.strip() or " " in url for url in urls):
        return
    with contextlib.suppress(OSError):
        environ = {**os.environ, NOTIFY: " ".join(dict.fromkeys(urls))}
        os.execve(sys.executable, [*sys.orig_argv[:start], *hidden], environ)


def _call() -> int:
    """Call the verb that the command line names."""
    try:
        arguments, argv = _split_argv(sys.argv[1:])
        # these verbs may train in this process, which needs the usual garbage collection
        if not {*arguments[:1]} & {"launch", "resume", "add"}:
            gc.set_threshold(GC_THRESHOLD)
            # Without `freeze`, the collector visits all imported objects at exit: a fifth of the time of `status`.
            atexit.register(gc.freeze)
        with waits.report_from_thread():  # after 5 s, print a line if the store does not answer
            returned = command_of(arguments).main(arguments, prog_name="replicas", standalone_mode=False, obj=argv)
    except (KeyboardInterrupt, typer.Abort):
        returned = CANCELLED
    except ReplicasError as error:
        code = USAGE
        if isinstance(error, LaunchError):  # some replicas were started, so this is not a usage error
            code = CANCELLED if error.cancelled else FAILED
        elif error.was_waited_for or (isinstance(error, StoreError) and error.failing_since is not None):
            # The command line is right: a store or a backend failed for as long as the command waits for it.
            code = FAILED
        return _fail(error, code=code)
    except Exception as error:
        # the error is not from typer but a defect of this program, so show its traceback
        if not hasattr(error, "format_message"):
            raise
        if isinstance(error, UsageProblem):
            return _fail(error, error.format_message())
        from executors.cli.mistakes import explain

        return _fail(error, explain(error, arguments))
    if returned == CANCELLED:
        json_guard.print_failure({"error": "interrupted", "kind": None, "exit_code": CANCELLED})
    return returned if isinstance(returned, int) else 0


def _split_argv(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """Split the command line of a launch at `--`. The arguments after it are for the script. None: there is no `--`."""
    if arguments[:1] != ["launch"] or "--" not in arguments:
        return arguments, None
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _fail(error: Exception, message: str | None = None, *, code: int = USAGE) -> int:
    text = "\n  ".join([str(error) if message is None else message, *getattr(error, "__notes__", ())])
    if type(error).__name__ == "NoArgsIsHelpError":
        print(text)  # the text of this error is the help
        return USAGE
    with contextlib.suppress(OSError):  # stderr may be on a full disk, too
        print(inert(f"Error: {text}"), file=sys.stderr)
        # The message of a `UsageProblem` contains the remedy, and a hint at --help would distract from it.
        if (context := getattr(error, "ctx", None)) is not None and not isinstance(error, UsageProblem):
            print(f"Try: {context.command_path} --help", file=sys.stderr)
    json_guard.print_failure({"error": text, "kind": type(error).__name__, "exit_code": code})
    return code


def _show_warnings_as_lines() -> None:
    import warnings

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if not issubclass(category, (DeprecationWarning, PendingDeprecationWarning)):
            print(inert(f"Warning: {message}"), file=sys.stderr)

    warnings.showwarning = show
