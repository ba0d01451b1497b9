"""Arguments and options that several verbs share; the run a user names; `k=v` texts as values."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from executors.cli.backends import check_options
from executors.cli.output import UsageProblem, note, refuse, usage_errors
from executors.errors import BackendError
from executors.registry import OptionText
from executors.settings import durations
from executors.settings.declaration import Duration
from executors.settings.durations import DURATIONS
from executors.settings.settings import DEFAULTS, OPTIONS
from executors.task.arguments import json_or_text

if TYPE_CHECKING:
    from executors.run.run import Run

EXAMPLES = {
    "--arg": "--arg steps=500 or --arg 'sizes=[64, 128]'",
    "--env": "--env OMP_NUM_THREADS=1",
    "--option": "--option max_parallel=2",
}
FROM_PYTHON = {"True": "true", "False": "false", "None": "null"}


def _complete_run(incomplete: str) -> list[str]:
    from executors.run.run_index import known_run_ids

    return [run_id for run_id in known_run_ids() if run_id.startswith(incomplete)]


RunArgument = Annotated[str, Argument(metavar="RUN", help="A run id, or URL/RUN_ID.", autocompletion=_complete_run)]
RunArguments = Annotated[
    list[str], Argument(metavar="RUN…", help="Run ids, or URL/RUN_ID.", autocompletion=_complete_run)
]


def _ranks_in(text: str) -> list[int]:
    """Return the ranks of `0,2-5`."""
    found = [re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", part.strip()) for part in text.split(",")]
    spans = [range(int(each[1]), int(each[2] or each[1]) + 1) for each in found if each is not None]
    if len(spans) < len(found) or not all(spans):
        raise UsageProblem(f"{text!r} does not name ranks, as 3 or 0,2-5 do.")
    return [rank for span in spans for rank in span]


def _flat(given: Any) -> Any:
    """Return the ranks that an option names which may be repeated, each once."""
    return given and list(dict.fromkeys(rank for ranks in given for rank in ranks))


RanksOption = Annotated[
    list[Any] | None,
    Option("--rank", "-r", metavar="R,…", parser=_ranks_in, callback=_flat, help="Only these, as 0,2-5. Repeatable."),
]
RENDEZVOUS = "The rendezvous: a directory or a url in which the replicas meet. Default: a directory of this user."
RendezvousOption = Annotated[str | None, Option("--rendezvous", metavar="URL", help=RENDEZVOUS)]
ENV = "A variable for the replicas; never recorded. Repeatable."
EnvOption = Annotated[list[str] | None, Option("--env", "-e", metavar="K=V", help=ENV)]
SecretOption = Annotated[
    list[str] | None, Option("--secret", metavar="NAME", help="A secret, by its name. Repeatable.")
]
EXECUTOR = "The backend the run was launched with, or pkg.mod:Class, which is never taken from a record."
ExecutorOption = Annotated[str | None, Option("--backend", "-b", metavar="NAME", help=EXECUTOR)]
VOLUME = "Storage to mount, and where: NAME:/path, or a url (see `replicas backends`). Repeatable."
VolumeOption = Annotated[list[str] | None, Option("--volume", metavar="NAME:PATH", help=VOLUME)]
OPTION = "An option of the backend, of several as NAME.K=V; see `replicas backends`. Repeatable."
BackendOptions = Annotated[list[str] | None, Option("--option", metavar="K=V", help=OPTION)]
COLUMNS = "Numbers to show that replicas report, as in lr,gnorm. Default: the first three."
ColumnsOption = Annotated[
    Any, Option("--columns", metavar="NAME,…", help=COLUMNS, parser=lambda text: [*filter(None, text.split(","))])
]


def parse_duration(text: str) -> float:
    """Return the seconds of `90`, `90s`, `5m`, `2h` or `1h30m`."""
    try:
        return durations.parse_duration(text)
    except ValueError as error:
        raise UsageProblem(str(error)) from None


def parse_path(text: str) -> Path:
    """Return a file or folder that an option names. An empty text, as of a variable that is not set, names none."""
    if not text:
        raise UsageProblem("is empty. Name a file or a folder; this folder is a dot.")
    return Path(text)


def setting_option(name: str, help: str) -> Any:
    """Return the option of a verb that gives a setting: with the flags, the metavar and the parser of its declaration.

    Args:
        name: the setting, a field of `Settings`.
        help: the text about it in the help of the verb.

    Example:
        Annotated[str | None, setting_option("restarts", "As for launch.")]
    """
    option = OPTIONS[name]
    flags = option.flags or (f"--{name.replace('_', '-')}",)
    more: dict[str, Any] = {"metavar": option.metavar} if option.metavar else {}
    if option.kind is Duration:
        more |= {"parser": parse_duration, "show_default": False}
    return Option(*flags, help=help, **more)


def add_settings(verb: Callable[..., Any], *, before: str) -> None:
    """Let a verb that takes `**settings` have an option for each declared setting.

    Args:
        verb: the function.
        before: the parameter before which the options stand in the help. `n` is the first of all options.

    Example:
        add_settings(launch, before="columns")
    """
    signature = inspect.signature(verb, eval_str=True)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    made = []
    for name, option in OPTIONS.items():
        kind = {Duration: float}.get(option.kind, option.kind)
        default = None if kind == list[str] else DEFAULTS[name]
        hint: Any = kind if default is not None else kind | None
        annotation: Any = Annotated[hint, setting_option(name, option.help)]
        keyword = inspect.Parameter.KEYWORD_ONLY
        made.append(inspect.Parameter(name, keyword, default=default, annotation=annotation))
    names = [each.name for each in own]
    first, split = (
        next(i for i, each in enumerate(own) if each.kind is inspect.Parameter.KEYWORD_ONLY),
        names.index(before),
    )
    parameters = [*own[:first], made[0], *own[first:split], *made[1:], *own[split:]]
    verb.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    verb.__annotations__ = {each.name: each.annotation for each in parameters}


TEE = "Show the output of these ranks, too, as in 0,2: below the table, or between the lines."
TeeOption = Annotated[Any, Option("--tee", metavar="R,…", parser=_ranks_in, help=TEE)]
WAIT = f"Wait at most this long ({DURATIONS}); then exit with 124."
WaitOption = Annotated[float | None, Option("--timeout", metavar="DURATION", parser=parse_duration, help=WAIT)]


def options_of(backend: str, option: Sequence[str] | None, volume: Sequence[str] | None) -> dict[str, Any]:
    """Return the values of --option, and of --volume as the backend's option `volumes`."""
    from executors.launcher.launch_settings import volumes_of
    from executors.launcher.parts import name_of, parts_of

    values = parse_values("--option", option)
    with usage_errors():
        if len(parts_of(backend)) > 1:
            if volume:
                refuse("--volume belongs to one backend: of several, give --option NAME.volumes='{…}'.")
            return values
        if volumes := volumes_of(volume, name_of(backend)):
            given = json_or_text(values["volumes"]) if "volumes" in values else {}
            if not isinstance(given, dict):
                refuse(f'--option volumes={values["volumes"]}: the form is --option \'volumes={{"/path": "NAME"}}\'.')
            values["volumes"] = {**given, **volumes}
    return values


def find_run(
    run: str,
    rendezvous: str | None,
    backend: str | None = None,
    option: Sequence[str] | None = None,
    volume: Sequence[str] | None = None,
) -> Run:
    """Return the run a user names, with the executor that the user names, if any.

    Options are added to those of the launch, as far as this machine noted them or takes them from a record. Those of
    several backends say of which they are, as in `slurm.partition`.
    """
    from executors.registry import executor_class, get_executor
    from executors.run.lookup import attach
    from executors.run.run import view_of

    if backend is None and volume:
        refuse("--volume belongs to a backend: give --backend, too.")
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
            with contextlib.suppress(BackendError):  # the record's are not taken: those given are all
                known = view_of(found).placements.options_of(name)
            executors.append(get_executor(name, {**known, **given}))
        return attach(run, rendezvous=rendezvous, executor=executors)


def _options_by_name(option: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """Return the options of each backend, where each says of which it is."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in parse_values("--option", option).items():
        backend, _, name = key.rpartition(".")
        if not backend:
            refuse(f"--option belongs to a backend: give --backend, too. Of several, write --option NAME.{name}=….")
        found.setdefault(backend, {})[name] = value
    return found


def parse_values(option: str, texts: Sequence[str] | None) -> dict[str, Any]:
    """Return the values of `k=v` texts as texts; the annotations of the backend's constructor decide their types.

    Args:
        option: the name of the flag, for messages.
        texts: what the user gave, each as NAME=VALUE.
    """
    values = {name: OptionText(text) for name, text in parse_texts(option, texts).items()}
    warn_of_python_words(option, values)
    return dict(values)


def warn_of_python_words(option: str, values: Mapping[str, Any]) -> None:
    """Say on stderr which values are strings that look like constants of Python."""
    for name, value in values.items():
        if isinstance(value, str) and value in FROM_PYTHON:
            text = FROM_PYTHON[value]
            note(f"{option} {name}={value} is a string; JSON writes {name}={text}.")


def parse_texts(option: str, texts: Sequence[str] | None) -> dict[str, str]:
    """Return the values of `k=v` texts as they are."""
    values: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            refuse(f"{option} {text!r}: the form is {option} NAME=VALUE, as in {EXAMPLES[option]}.")
        if name in values:
            refuse(f"{option} {name} is given twice.")
        values[name] = value
    return values
