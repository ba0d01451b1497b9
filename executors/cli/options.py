"""Options that several verbs share: declares them, reads `K=V` texts, and finds the run or makes the executor."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from typer import Argument, Option

from executors.cli.output import UsageProblem, note, refuse, usage_errors
from executors.errors import BackendError
from executors.registry import OptionText
from executors.settings import durations
from executors.settings.declaration import PANELS, WATCH, WHERE, Duration
from executors.settings.settings import DEFAULTS, OPTIONS
from executors.task.arguments import json_or_text

if TYPE_CHECKING:
    from executors.protocol import ServerlessExecutor
    from executors.run.run import Run

EXAMPLES = {
    "--arg": "--arg steps=500 or --arg 'sizes=[64, 128]'",
    "--env": "--env OMP_NUM_THREADS=1",
    "--option": "--option max_parallel=2",
}
PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


def complete_backend(incomplete: str) -> list[str]:
    """Return the names of backends that begin with a text, for the completion of a shell.

    Args:
        incomplete: the text so far.

    Example:
        complete_backend("mo")  # ["modal"]
    """
    from executors.registry import known_backends

    return [name for name in sorted(known_backends()) if name.startswith(incomplete)]


def _complete_run(incomplete: str) -> list[str]:
    from executors.registry.run_index import known_run_ids

    return [run_id for run_id in known_run_ids() if run_id.startswith(incomplete)]


RUN = "The id of a run, as `replicas ls` lists it, or URL/RUN_ID for a run in another rendezvous."
RunArgument = Annotated[str, Argument(metavar="RUN", help=RUN, autocompletion=_complete_run)]
RunArguments = Annotated[
    list[str], Argument(metavar="RUN…", help="Ids of runs, or URL/RUN_ID.", autocompletion=_complete_run)
]


def _ranks_in(text: str) -> list[int]:
    """Return the ranks that a text names: `0,2-5` is 0, 2, 3, 4 and 5."""
    found = [re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", part.strip()) for part in text.split(",")]
    spans = [range(int(each[1]), int(each[2] or each[1]) + 1) for each in found if each is not None]
    if len(spans) < len(found) or not all(spans):
        raise UsageProblem(f"{text!r} does not name ranks. Write 3, or 0,2-5.")
    return [rank for span in spans for rank in span]


def _members_in(text: str) -> list[tuple[int, int | None]]:
    """Return the ranks and processes that a text names: `0,2.1` is all of rank 0, and process 1 of rank 2."""
    found: list[tuple[int, int | None]] = []
    for part in text.split(","):
        if (one := re.fullmatch(r"(\d{1,7})\.(\d{1,4})", part.strip())) is not None:
            found.append((int(one[1]), int(one[2])))
        elif "." in part:
            raise UsageProblem(f"{text!r} does not name a process of a replica. Write 2.1 for process 1 of rank 2.")
        else:
            found += [(rank, None) for rank in _ranks_in(part)]
    return found


def _flat(given: Any) -> Any:
    """Return the ranks of an option that was given several times. Each rank is listed once."""
    return given and list(dict.fromkeys(rank for ranks in given for rank in ranks))


RanksOption = Annotated[
    list[Any] | None,
    Option(
        "--rank",
        "-r",
        metavar="R,…",
        parser=_ranks_in,
        callback=_flat,
        help="Only these ranks, as in 3 or 0,2-5. Repeatable. Default: all.",
    ),
]
MembersOption = Annotated[
    list[Any] | None,
    Option(
        "--rank",
        "-r",
        metavar="R,…",
        parser=_members_in,
        callback=_flat,
        help="Only these ranks, as in 3 or 0,2-5, or one process of a rank that has several: 2.1. Repeatable. "
        "Default: all.",
    ),
]
RENDEZVOUS = (
    "The directory or URL in which the replicas meet, as in /shared/runs or s3://BUCKET/runs. Default: a directory of "
    "this user on this machine."
)
RendezvousOption = Annotated[str | None, Option("--rendezvous", metavar="URL", help=RENDEZVOUS, rich_help_panel=WHERE)]
ENV = "An environment variable for the replicas. Its value is not recorded. Repeatable."
EnvOption = Annotated[list[str] | None, Option("--env", "-e", metavar="K=V", help=ENV, rich_help_panel=WHERE)]
SECRET = "The name of a secret of the backend, for the environment of the replicas. Repeatable."
SecretOption = Annotated[list[str] | None, Option("--secret", metavar="NAME", help=SECRET, rich_help_panel=WHERE)]
EXECUTOR = "The backend of the run. Needed if the launch named a pkg.mod:Class. Default: as recorded."
ExecutorOption = Annotated[
    str | None,
    Option("--backend", "-b", metavar="NAME", help=EXECUTOR, rich_help_panel=WHERE, autocompletion=complete_backend),
]
VOLUME = "Storage to mount and its path: NAME:/path, or a URL (see `replicas backends`). Repeatable."
VolumeOption = Annotated[list[str] | None, Option("--volume", metavar="NAME:PATH", help=VOLUME, rich_help_panel=WHERE)]
OPTION = "An option of the backend, listed by `replicas backends`. With several backends: NAME.K=V. Repeatable."
BackendOptions = Annotated[list[str] | None, Option("--option", metavar="K=V", help=OPTION, rich_help_panel=WHERE)]
TASK_DIGEST = (
    "The digest of the task, if another machine launched the run: task_digest in `replicas status RUN --json`."
)
DigestOption = Annotated[str | None, Option(metavar="SHA256", help=TASK_DIGEST, rich_help_panel=WHERE)]
TRUST_BUCKET = "Start the code that the rendezvous holds without checking it. It gets the credentials of this machine."
TrustOption = Annotated[bool, Option("--trust-bucket", help=TRUST_BUCKET, rich_help_panel=WHERE)]
NOTIFY_HELP = (
    "Where events of the run are sent, such as its end: an https URL that gets JSON, a URL of apprise such as "
    "slack://…, env:NAME or file:PATH. A URL is a secret and is not recorded. Repeatable. Default: none."
)
NotifyOption = Annotated[list[str] | None, Option("--notify", metavar="URL", help=NOTIFY_HELP, rich_help_panel=WATCH)]
COLUMNS = "The reported numbers to show, as in lr,gnorm. Default: the first three."
ColumnsOption = Annotated[
    Any, Option("--columns", metavar="NAME,…", help=COLUMNS, parser=lambda text: [*filter(None, text.split(","))])
]


def parse_duration(text: str) -> float:
    """Return the seconds of `90`, `90s`, `5m`, `2h` or `1h30m`. Another text is a usage error."""
    try:
        return durations.parse_duration(text)
    except ValueError as error:
        raise UsageProblem(str(error)) from None


def parse_path(text: str) -> Path:
    """Return the file or folder that an option names.

    An empty text is a usage error: it comes from a variable of the shell that is not set, and would mean this folder.
    """
    if not text:
        raise UsageProblem("is empty. Name a file or a folder. The current folder is a dot.")
    return Path(text)


def notify_urls(given: Sequence[str] | None) -> tuple[str, ...]:
    """Return the URLs of --notify, checked. Without the option, they come from `REPLICAS_NOTIFY`.

    Args:
        given: the values of the option. None: the option was not given.

    Raises:
        ValueError: a value is not a URL to which notifications can be sent.

    Example:
        notify_urls(["env:SLACK_URL"])
    """
    from executors.notices.targets import resolve_targets
    from executors.settings.run_spec import NOTIFY

    return resolve_targets(given or os.environ.get(NOTIFY, "").split())


def setting_option(name: str, help: str, panel: str = "") -> Any:
    """Return an option for a declared setting, with the flags, the metavar and the parser of the declaration.

    Args:
        name: the setting, a field of `Settings`.
        help: the text about it in the help of the verb.
        panel: the panel of the help. Empty: the panel of the declaration.

    Example:
        Annotated[str | None, setting_option("restarts", "New rules for restarts.")]
    """
    option = OPTIONS[name]
    flags = option.flags or (f"--{name.replace('_', '-')}",)
    more: dict[str, Any] = {"metavar": option.metavar} if option.metavar else {}
    if option.kind is Duration:
        more |= {"parser": parse_duration, "show_default": False}
    return Option(*flags, help=help, rich_help_panel=panel or option.panel, **more)


def add_settings(verb: Callable[..., Any], *, panels: Mapping[str, Sequence[str]]) -> None:
    """Add an option for each declared setting to a verb that takes `**settings`, and put all options of the verb into
    panels.

    Args:
        verb: the function.
        panels: the names of parameters by panel, in the order of the help. The verb's own parameters must be among
            them. Settings that are missing follow, each in the panel of its declaration.

    Example:
        add_settings(launch, panels={"Run": ["n", "backend"], "Testing": ["dry_run"]})
    """
    signature = inspect.signature(verb, eval_str=True)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    given = [each for each in own if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    options = [each for each in own if each.kind is inspect.Parameter.KEYWORD_ONLY]
    for name, option in OPTIONS.items():
        kind = {Duration: float}.get(option.kind, option.kind)
        default = None if kind == list[str] else DEFAULTS[name]
        hint: Any = kind if default is not None else kind | None
        annotation: Any = Annotated[hint, setting_option(name, option.help)]
        keyword = inspect.Parameter.KEYWORD_ONLY
        options.append(inspect.Parameter(name, keyword, default=default, annotation=annotation))
    panel_of = {name: panel for panel, names in panels.items() for name in names}
    panel_of = {**{name: option.panel for name, option in OPTIONS.items()}, **panel_of}
    listed = [name for names in panels.values() for name in names]
    # Typer shows panels and options in the order of the parameters.
    options.sort(
        key=lambda each: (
            PANELS.index(panel_of[each.name]),
            listed.index(each.name) if each.name in listed else len(listed),
        )
    )
    parameters = [*given, *(_in_panel(each, panel_of[each.name]) for each in options)]
    verb.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    verb.__annotations__ = {each.name: each.annotation for each in parameters}


def _in_panel(parameter: inspect.Parameter, panel: str) -> inspect.Parameter:
    """Return a parameter with its option in another panel. Verbs share their options, so the option is copied first."""
    hint, option, *more = get_args(parameter.annotation)
    option = copy.copy(option)
    option.rich_help_panel = panel
    return parameter.replace(annotation=Annotated[(hint, option, *more)])


TEE = "Also show the output of these ranks, as in 0,2. Default: none."
TeeOption = Annotated[Any, Option("--tee", metavar="R,…", parser=_ranks_in, help=TEE)]
WAIT = "Longest wait, as in 90s, 5m or 1h30m. After it the exit code is 124. Default: no limit."
WaitOption = Annotated[float | None, Option("--timeout", metavar="DURATION", parser=parse_duration, help=WAIT)]


def make_executor(backend: str, options: Mapping[str, Any]) -> ServerlessExecutor:
    """Return the executor of a backend. Raise a usage error for options of a wrong type.

    Args:
        backend: the name of the backend, or pkg.mod:Class.
        options: the options by name.

    Example:
        make_executor("local", {"max_parallel": 2})
    """
    from executors.registry import executor_class, get_executor

    check_options(backend, executor_class(backend), options)
    return get_executor(backend, options)


def check_options(backend: str, cls: type, options: Mapping[str, Any]) -> None:
    """Raise a usage error for an option whose value has a wrong type. `get_executor` checks the names.

    Args:
        backend: the name of the backend, for the message.
        cls: the class of the executor.
        options: the values by name. An `OptionText` is converted to the type of its option.

    Example:
        check_options("local", LocalExecutor, {"max_parallel": 2})
    """
    from executors.registry import fits, parameters_of, read_options

    parameters = parameters_of(cls)
    for name, value in read_options(cls, options).items():
        if name in parameters and not fits(value, parameters[name].annotation):
            kind = name_type(parameters[name].annotation)
            # In a settings file, 3.10 without quotes is a number, and equals 3.1.
            hint = parameters[name].annotation
            is_unquoted = isinstance(value, bool | int | float) and fits("", hint) and not fits([], hint)
            advice = " Write it in quotes." if is_unquoted else ""
            refuse(f"Option {name!r} of backend {backend!r} takes {kind}, got {value!r}.{advice}")


def name_type(annotation: Any) -> str:
    """Return a type as Python writes it, without module names.

    Args:
        annotation: the type, or its text.

    Example:
        name_type(int)  # "int"
    """
    if annotation is inspect.Parameter.empty:
        return ""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:\w+\.)+(\w)", r"\1", text)


def options_of(backend: str, option: Sequence[str] | None, volume: Sequence[str] | None) -> dict[str, Any]:
    """Return the options of a backend by name. The values of --volume become its option `volumes`."""
    from executors.launcher.launch_settings import volumes_of
    from executors.launcher.several_backends import name_of, parse_backends

    values = parse_values("--option", option)
    with usage_errors():
        if len(parse_backends(backend)) > 1:
            if volume:
                refuse("--volume does not name its backend. With several backends, write --option NAME.volumes='{…}'.")
            return values
        if volumes := volumes_of(volume, name_of(backend)):
            given = json_or_text(values["volumes"]) if "volumes" in values else {}
            if not isinstance(given, dict):
                refuse(
                    f"--option volumes={values['volumes']} is not a mapping. "
                    """Write --option 'volumes={"/path": "NAME"}'."""
                )
            values["volumes"] = {**given, **volumes}
    return values


def find_run(
    run: str,
    rendezvous: str | None,
    backend: str | None = None,
    option: Sequence[str] | None = None,
    volume: Sequence[str] | None = None,
) -> Run:
    """Return the run that a user names.

    Options are added to the options of the launch, if this machine has recorded them or trusts the record.

    Args:
        run: the id of the run, or URL/RUN_ID.
        rendezvous: the directory or URL of the run. None: the rendezvous in `run`, or the default of this machine.
        backend: the backend of the run. None: as recorded.
        option: `K=V` texts. Without `backend` each names its backend, as in `slurm.partition=gpu`.
        volume: `NAME:PATH` texts, for `backend` only.
    """
    from executors.registry import executor_class, get_executor
    from executors.run.lookup import attach
    from executors.run.run import view_of

    if backend is None and volume:
        refuse("--volume does not name its backend. Add --backend NAME.")
    by_backend = {} if backend is not None else _options_by_name(option)
    with usage_errors():
        found = attach(run, rendezvous=rendezvous, executor=backend)
        if not (option or volume):
            return found
        if backend is not None:
            by_backend = {backend: options_of(backend, option, volume)}
        executors = []
        for name, given in by_backend.items():
            known: Mapping[str, Any] = {}
            check_options(name, executor_class(name), given)
            # Ignore recorded options that this machine does not trust. Only the options on the command line remain.
            with contextlib.suppress(BackendError):
                known = view_of(found).placements.options_of(name)
            executors.append(get_executor(name, {**known, **given}))
        return attach(run, rendezvous=rendezvous, executor=executors)


def _options_by_name(option: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """Return options by backend, from texts such as `slurm.partition=gpu`."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in parse_values("--option", option).items():
        backend, _, name = key.rpartition(".")
        if not backend:
            refuse(f"--option {name} does not name its backend. Add --backend NAME, or write --option NAME.{name}=….")
        found.setdefault(backend, {})[name] = value
    return found


def parse_values(option: str, texts: Sequence[str] | None) -> dict[str, Any]:
    """Return the values of `K=V` texts as texts. The annotations of the backend's constructor decide their types.

    Args:
        option: the flag, for messages.
        texts: the texts from the command line, each as NAME=VALUE.
    """
    values = {name: OptionText(text) for name, text in parse_texts(option, texts).items()}
    warn_of_python_words(option, values)
    return dict(values)


def warn_of_python_words(option: str, values: Mapping[str, Any]) -> None:
    """Print a note on stderr for each value that is a string but looks like a Python constant."""
    for name, value in values.items():
        if isinstance(value, str) and value in PYTHON_CONSTANTS:
            note(f"{option} {name}={value} is a string. For the constant, write {name}={PYTHON_CONSTANTS[value]}.")


def parse_texts(option: str, texts: Sequence[str] | None) -> dict[str, str]:
    """Return the values of `K=V` texts without converting them.

    Args:
        option: the flag, for messages.
        texts: the texts from the command line, each as NAME=VALUE.
    """
    values: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            refuse(f"{option} {text!r} is not of the form NAME=VALUE. Write, for example, {EXAMPLES[option]}.")
        if name in values:
            refuse(f"{option} {name}=… is given twice. Remove one of them.")
        values[name] = value
    return values
