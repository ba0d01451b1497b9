"""The verb `config`, and the settings of `launch` from files and the environment."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import textwrap
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option

from executors.cli.backends import describe_options
from executors.cli.documents import ConfigDocument, FoundSettingDocument
from executors.cli.options import check_options
from executors.cli.output import JsonOption, Output, UsageProblem, json_guard, refuse, usage_errors
from executors.cli.verb_help import describe
from executors.errors import BackendError, ReplicasError
from executors.settings.declaration import Duration, key_of
from executors.settings.settings import OPTIONS

if TYPE_CHECKING:
    from executors.launcher.launch_settings import FoundSettings

GIVEN = f"{__name__}.given"
# these settings have separate tables: arguments and options of the backend
NOT_SETTINGS = ("config", "profile", "env", "arg", "option")
TEMPLATE = """\
# Settings of `replicas launch` in this folder and below. A flag wins over the variable REPLICAS_<FLAG>, the variable
# wins over a profile, and a profile wins over the settings outside of profiles. `replicas config` prints the settings
# that apply here, with the origin of each. Write no secrets into this file: `secret` has the names of secrets only.
"""
EXAMPLES = {
    "entrypoint": "train.py:main",
    "backend": "local",
    "rendezvous": "s3://BUCKET/runs",
    "run-id": "first-try",
    "volume": ["corpus:/data"],
    "columns": "lr,gnorm",
    "notify": ["env:SLACK_URL"],
} | {key_of(name, option): option.example for name, option in OPTIONS.items() if option.example is not None}
PROFILE = "The profile of the settings files to use. Default: none."
CONFIG = "Another file of settings to read. Repeatable. The last one wins."
ProfileOption = Annotated[str | None, Option("--profile", metavar="NAME", help=PROFILE)]
ConfigOption = Annotated[list[Path] | None, Option("--config", metavar="FILE", help=CONFIG)]


def use_settings(command: Any, context: Any, arguments: list[str]) -> None:
    """Use settings from files and the environment as defaults of the options of `launch`. `settings_of` returns their
    origins.

    If a setting asks for JSON, later errors are JSON documents.

    Args:
        command: the command of typer.
        context: the context of typer.
        arguments: the command line.

    Example:
        use_settings(command, context, ["train.py:main", "--n", "4"])
    """
    from executors.launcher.launch_settings import read_settings
    from executors.task.arguments import convert

    # Until the files are read, only the environment decides about JSON. Wrong values are refused later.
    with contextlib.suppress(ValueError):
        json_guard.as_json = json_guard.as_json or bool(convert(os.environ.get("REPLICAS_JSON") or "false", bool))
    given, _, _ = command.make_parser(context).parse_args(args=list(arguments))
    if "help" in given or context.resilient_parsing:
        return
    keys = keys_of(command)
    with usage_errors():
        context.meta[__name__] = settings = read_settings(
            {key: kind for key, (_, kind) in keys.items()},
            config=given.get("config") or (),
            profile=given.get("profile"),
            entrypoint=given.get("entrypoint"),
            backend=given.get("backend"),
        )
    context.default_map = {keys[key][0]: value for key, value in settings.values.items()}
    json_guard.as_json = {**context.default_map, **given}.get("as_json", False)
    flags = {option.name: option.opts[0] for option in command.get_params(context) if option.opts[0] != option.name}
    context.meta[GIVEN] = {
        _key(flags.get(name, name)): flags.get(name, "the command line")
        for name, value in given.items()
        if value or value == ""  # a text may be given as an empty one, and is refused
    }


def settings_of(context: Context) -> FoundSettings:
    """Return the settings that `use_settings` has read."""
    return context.meta[__name__]  # type: ignore[no-any-return]


def was_given(context: Context, key: str) -> bool:
    """Return True if the command line has the flag of a setting. A value from a settings file does not count."""
    return key in context.meta[GIVEN]


def origins_of(context: Context, backend: str, *texts: Mapping[str, Any]) -> dict[str, str]:
    """Return the origin of each setting of a launch: a flag, a variable of the environment, or a file.

    Args:
        context: the context of typer.
        backend: the backend, whose options are settings as well.
        texts: the values of --arg and --option on the command line, by name.
    """
    given = {key: flag for key, flag in context.meta[GIVEN].items() if key != "dry-run"}
    for key, name, values in zip(("arg", "option"), ("args", "option"), texts, strict=True):
        if given.pop(key, None):
            given |= {f"{name}.{each}": f"--{key}" for each in values}
    return {**settings_of(context).origins(backend), **given}


@contextlib.contextmanager
def with_origins(context: Context, backend: str) -> Iterator[None]:
    """Add the origin of each setting that the message of an error within the block names."""
    try:
        yield
    except (ReplicasError, UsageProblem) as error:
        for name, origin in settings_of(context).origins(backend).items():
            word = re.escape(name.rpartition(".")[2]).replace("-", "[-_]")
            is_given = name in context.meta[GIVEN]
            if not is_given and re.search(
                rf"\b{word}\b", error.format_message() if isinstance(error, UsageProblem) else str(error), re.IGNORECASE
            ):
                error.add_note(f"The setting {name} is from {origin}.")
        raise


def keys_of(command: Any) -> dict[str, tuple[str, Any]]:
    """Return the settings of a command. Each key has the name of the function's parameter, and its type.

    Args:
        command: the command of typer. Each of its options is a setting.

    Example:
        keys_of(command_of(["launch"]).commands["launch"])["run-id"]
    """
    found: dict[str, tuple[str, Any]] = {}
    for name, parameter in inspect.signature(inspect.unwrap(command.callback), eval_str=True).parameters.items():
        hint, *about = typing.get_args(parameter.annotation) or (parameter.annotation,)
        flags = (str(flag) for each in about for flag in (each.default, *(each.param_decls or ())))  # "--n", "-n"
        key = _key(next((flag for flag in flags if flag.startswith("--")), name))
        if about and key not in NOT_SETTINGS:
            kinds = typing.get_args(hint) or (hint,)
            plain = next((kind for kind in (bool, int, float, list[str]) if kind in kinds), str)
            found[key] = (name, Duration if about[0].metavar == "DURATION" else plain)
    return found


def _key(flag: str) -> str:
    return flag.removeprefix("--").replace("_", "-")


@describe(examples=["replicas config", "replicas config --template", "replicas config --profile small --json"])
def config(
    context: Context,
    entrypoint: Annotated[
        str | None,
        Argument(metavar="ENTRYPOINT", help="The entrypoint of the launch. Its file may have settings, too."),
    ] = None,
    config: ConfigOption = None,
    profile: ProfileOption = None,
    template: Annotated[
        bool, Option("--template", help="Write a replicas.toml with all settings, commented out.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Print the settings that `launch` would use here, with their origins."""
    from executors.launcher.launch_settings import read_settings
    from executors.launcher.settings_files import FILE

    output = Output(as_json)
    parent: Any = context.parent
    command = parent.command.commands["launch"]
    if template:
        if Path(FILE).exists():
            refuse(f"{FILE} exists in this folder. Move or delete it first.")
        Path(FILE).write_text(_template(command, parent), encoding="utf-8")
        output.print(f"Wrote {FILE}. To see the settings that apply: replicas config")
        return 0
    keys = {key: kind for key, (_, kind) in keys_of(command).items()}
    with usage_errors():
        settings = read_settings(keys, config=config or (), profile=profile, entrypoint=entrypoint)
        _check_options(settings)
    if as_json:
        found: dict[str, FoundSettingDocument] = {
            ".".join(place): {"value": shown_value(place, setting.value), "origin": setting.origin}
            for place, setting in settings.found.items()
        }
        document: ConfigDocument = {"files": list(settings.files), "profile": profile, "settings": found}
        output.document(document)
        return 0
    lines: list[tuple[str, str]] = []
    table: tuple[str, ...] = ()
    for place, setting in sorted(settings.found.items(), key=lambda item: (len(item[0]), item[0][:-1])):
        if place[:-1] != table:
            table = place[:-1]
            lines.append((f"[{'.'.join(filter(None, table))}]", ""))
        lines.append((f"{_toml_key(place[-1])} = {_toml(shown_value(place, setting.value))}", f"# {setting.origin}"))
    width = max((len(text) for text, _ in lines), default=0)
    for text, origin in lines:
        output.print(f"{text:<{width}}  {origin}".rstrip())
    if not lines:
        output.print(
            f"No settings: there is no {FILE} in this folder or above. To write one: replicas config --template"
        )
    return 0


def shown_value(place: tuple[str, ...], value: Any) -> Any:
    """Return the value of a setting as it may be shown. URLs of notifications are masked.

    Args:
        place: the place of the setting in a file.
        value: its value.

    Example:
        shown_value(("notify",), ["https://example.org/secret"])  # ["***"]
    """
    from executors.masking import MASK
    from executors.notices.targets import is_reference

    if place != ("notify",):
        return value
    return [text if is_reference(text) else MASK for text in value]


def _check_options(settings: FoundSettings) -> None:
    """Refuse options that a backend does not have, or that have a wrong type. Backends that cannot load are skipped."""
    from executors.registry import check_option_names, executor_class

    for backend in {place[1] for place in settings.found if place[0] == "option" and place[1]}:
        with contextlib.suppress(BackendError):
            cls = executor_class(backend)
            for name, value in settings.options(backend).items():
                try:
                    check_option_names(backend, cls, [name])
                    check_options(backend, cls, {name: value})
                except (ValueError, UsageProblem) as error:
                    refuse(f"{settings.origins(backend)[f'option.{name}']}: {error}")


def _template(command: Any, context: Any) -> str:
    """Return the text of a file with all settings, commented out."""
    from executors.registry import executor_class

    kinds: dict[Any, Any] = {int: 8, float: 1.5, bool: True, Duration: "1h30m"}
    helps = {option.name: str(option.help or "").removesuffix(" Repeatable.") for option in command.get_params(context)}
    lines = [TEMPLATE]
    for key, (name, kind) in keys_of(command).items():
        lines += textwrap.wrap(helps[name], 117, initial_indent="# ", subsequent_indent="# ")
        lines += [f"# {key} = {_toml(EXAMPLES[key] if key in EXAMPLES else kinds.get(kind, '…'))}", ""]
    lines += ["# Arguments of the entrypoint, as with --arg.", "# [args]", "# steps = 4000", ""]
    lines += [
        "# Options of a backend, for launches with this backend. `replicas backends` lists them.",
        "# [option.local]",
    ]
    options = {option["name"]: option["default"] for option in describe_options(executor_class("local"))}
    lines += [f"# {name} = {_toml(default)}" for name, default in options.items() if default is not None]
    lines += [
        "",
        "# A profile has any of these settings under a name: replicas launch --profile small",
        "# [profile.small]",
        "# n = 2",
    ]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_toml_key(key)} = {_toml(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)
