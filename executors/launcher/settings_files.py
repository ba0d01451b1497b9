"""Settings files: finding them, and reading and checking their content."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executors.errors import EntrypointError, unknown_name
from executors.masking import looks_secret
from executors.notices.targets import is_reference
from executors.registry import known_backends
from executors.settings.declaration import Duration
from executors.settings.durations import parse_duration
from executors.settings.policy import HangLimits, Restarts
from executors.shipping.script_header import read_text, script_header, script_of, toml_of
from executors.store.url import directory_of
from executors.task.arguments import describe_annotation
from executors.task.entrypoint import parse_entrypoint

FILE, PROJECT = "replicas.toml", "pyproject.toml"
SECRET = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
POLICIES: Mapping[str, Callable[[str], object]] = {
    "restarts": Restarts.parse,
    "hang-timeout": HangLimits.of,
    "start-timeout": lambda text: HangLimits.of(start_timeout=text),
}
Place = tuple[str, ...]  # ("n",), ("args", "steps") or ("option", "modal", "region")


@dataclass(frozen=True)
class Setting:
    """The value of a setting, and the file or variable that it comes from."""

    value: Any
    origin: str
    text: str | None = None
    """The text of the option, if an environment variable gives it. None if a file gives it."""


@dataclass(frozen=True)
class Level:
    """The settings of one file."""

    origin: str
    values: Mapping[Place, Setting]
    profiles: Mapping[str, Mapping[Place, Setting]]

    @classmethod
    def of(cls, table: Mapping[str, Any], origin: str, folder: Path, keys: Mapping[str, Any]) -> Level:
        plain = dict(table)
        profiles = plain.pop("profile", {})
        if not isinstance(profiles, dict) or not all(isinstance(each, dict) for each in profiles.values()):
            raise ValueError(f"{origin}: profile is a table of profiles, as in [profile.small].")
        return cls(
            origin,
            dict(_flattened(plain, origin, folder, keys)),
            {
                name: dict(_flattened(each, f"[profile.{name}] of {origin}", folder, keys))
                for name, each in profiles.items()
            },
        )


def _flattened(
    table: Mapping[str, Any], origin: str, folder: Path, keys: Mapping[str, Any]
) -> Iterator[tuple[Place, Setting]]:
    """Yield the settings of a table, checked."""
    seen: set[str] = set()
    for name, value in table.items():
        key = name.replace("_", "-")
        if key in seen:
            raise ValueError(f"{origin}: {key} is set twice, as {key!r} and {key.replace('-', '_')!r}.")
        seen.add(key)
        if key == "env":
            raise ValueError(
                f"{origin}: env is not taken from a file, because its values may be secret. Give --env "
                "NAME=VALUE with the launch, or name a secret: secret = ['NAME']."
            )
        if key == "profile":
            raise ValueError(f"{origin}: a profile holds no other profiles.")
        if key in ("args", "option"):
            if not isinstance(value, dict):
                form = "[args]" if key == "args" else "[option.local]"
                raise ValueError(f"{origin}: {key} is a table, as in {form}.")
            yield from _arguments(value, origin) if key == "args" else _options(value, origin)
        elif key not in keys:
            known = unknown_name("setting", name, [*keys, "args", "option", "profile"])
            raise ValueError(f"{origin}: {known}")
        else:
            yield (key,), Setting(_from_folder(key, _checked(key, value, keys[key], origin), folder), origin)


def _arguments(table: Mapping[str, Any], origin: str) -> Iterator[tuple[Place, Setting]]:
    for name, value in table.items():
        try:
            json.dumps(value)
        except TypeError:
            raise ValueError(f"{origin}: the argument {name!r} holds a date or a time. Give it as a string.") from None
        yield ("args", name), Setting(value, origin)


def _options(table: Mapping[str, Any], origin: str) -> Iterator[tuple[Place, Setting]]:
    for backend, options in table.items():
        if not isinstance(options, dict):
            raise ValueError(
                f"{origin}: the option {backend!r} belongs in the table of its backend, as in [option.local]."
            )
        if ":" not in backend and backend not in known_backends():
            raise ValueError(f"{origin}, [option]: {unknown_name('backend named', backend, known_backends())}")
        for name, value in options.items():
            yield ("option", backend, name), Setting(value, origin)


def _checked(key: str, value: Any, kind: Any, origin: str) -> Any:
    """Return a value of a file, in the form that `launch()` takes.

    Raises:
        ValueError: the value has another type than its setting.
    """
    # A user may write the value of a secret in the place of its name.
    if key == "secret" and not (
        isinstance(value, list) and all(SECRET.fullmatch(str(name)) and not looks_secret(str(name)) for name in value)
    ):
        raise ValueError(
            f"{origin}: secret is a list of names, as in ['wandb']. The values of secrets are not kept in files: set "
            "the variable where you launch, or make a secret at the backend."
        )
    if key == "notify" and not (isinstance(value, list) and all(is_reference(str(text)) for text in value)):
        raise ValueError(
            f"{origin}: notify must be a list of places of URLs, as in ['env:SLACK_URL'] or ['file:~/.notify']. A URL "
            "is a secret, and is not kept in a settings file."
        )
    if kind is Duration and isinstance(value, str):
        try:
            return parse_duration(value)
        except ValueError as error:
            raise ValueError(f"{origin}: {key} = {value!r}: {error}") from None
    if key in POLICIES and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            POLICIES[key](str(value))
        except ValueError as error:
            raise ValueError(f"{origin}: {error}") from None
        return str(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {
        Duration: is_number,
        float: is_number,
        int: is_number and isinstance(value, int),
        bool: isinstance(value, bool),
        str: isinstance(value, str),
    }.get(kind, isinstance(value, list) and all(isinstance(item, str) for item in value))
    if not fits:
        takes = "seconds, or a duration as in '1h30m'" if kind is Duration else describe_annotation(kind)
        raise ValueError(f"{origin}: {key} takes {takes}, got {json.dumps(value, default=str)}.")
    return value


def _from_folder(key: str, value: Any, folder: Path) -> Any:
    """Return a setting whose relative path counts from the folder of the settings file."""
    if folder.absolute() == Path.cwd():
        return value
    if key == "rendezvous" and (directory := directory_of(value)) is not None:
        return str(folder.absolute() / directory)
    with contextlib.suppress(EntrypointError):
        if key in ("entrypoint", "health-check") and (file := parse_entrypoint(value).file) is not None:
            function = value[value.rindex(":") :] if ":" in value else ""
            return os.path.relpath(folder / file) + function
    return value


def found_files() -> list[tuple[Path, dict[str, Any]]]:
    """Return the settings file of the user and the nearest one, each with its content."""
    import platformdirs

    files: list[tuple[Path, dict[str, Any]]] = []
    with contextlib.suppress(RuntimeError):  # a user without a home directory has no such file
        own = Path(platformdirs.user_config_path("replicas")) / FILE
        files = [(own, _table(own))] if own.is_absolute() and os.path.isfile(own) else []
    here = Path.cwd()
    for folder in (here, *here.parents):
        beside = [(path, table) for name in (FILE, PROJECT) if (table := _table(path := folder / name)) is not None]
        if len(beside) > 1:
            raise ValueError(f"Two files of {folder} hold settings: {FILE} and {PROJECT} ([tool.replicas]). Keep one.")
        if beside and folder != here and beside[0][0].stat().st_uid not in (os.getuid(), 0):
            # Otherwise a user who can write to /tmp could choose the code of any launch in a folder below /tmp.
            print(
                f"replicas: {beside[0][0]} belongs to another user and is not read. If you trust it: --config FILE",
                file=sys.stderr,
            )
        elif beside:
            return [*files, *beside]
    return files


def given_file(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return a file that the user names, with its settings.

    Args:
        path: the file.

    Raises:
        ValueError: the file cannot be read, or has no settings.
    """
    table = _table(path, must_exist=True)
    if table is None:
        raise ValueError(f"{path} has no table [tool.replicas].")
    return path, table


def _table(path: Path, *, must_exist: bool = False) -> Any:
    """Return the settings of a file. None if the file has no settings or does not exist."""
    if not must_exist and not os.path.isfile(path):  # also if this user may not read the folder
        return None
    table = toml_of(read_text(path), str(path))
    return table if path.name != PROJECT else table.get("tool", {}).get("replicas")


def header_level(entrypoint: Any, keys: Mapping[str, Any]) -> Level | None:
    """Return the settings in the file of an entrypoint."""
    file = None if entrypoint is None else script_of(entrypoint)
    if file is None:
        return None
    tools = script_header(file).get("tool")
    table = tools.get("replicas") if isinstance(tools, dict) else None
    return (
        None if table is None else Level.of(table, f"the '# /// script' block of {file.absolute()}", file.parent, keys)
    )
