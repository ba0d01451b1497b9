"""The settings of a launch from files and from the environment: read, checked and merged, each with its origin.

The sources, from the weakest to the strongest:

1. the `replicas.toml` of the user
2. the nearest `replicas.toml`, or `[tool.replicas]` of a `pyproject.toml`, in this folder or above
3. `[tool.replicas]` in the `# /// script` block of the entrypoint's file
4. the files that `config` names
5. `[profile.NAME]` of any of these
6. `REPLICAS_<FLAG>` in the environment

Two tables are merged. The stronger of two lists replaces the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executors.errors import BackendError, unknown_name
from executors.launcher.settings_files import (
    FILE,
    Level,
    Place,
    Setting,
    found_files,
    given_file,
    header_level,
)
from executors.registry import OptionText, executor_class, read_options
from executors.settings.declaration import Duration, key_of
from executors.settings.durations import parse_duration
from executors.settings.settings import DEFAULTS, OPTIONS
from executors.task.arguments import convert, describe_annotation, json_or_text

KEYS: Mapping[str, str] = {name: key_of(name, option) for name, option in OPTIONS.items()}
"""The key of each setting of a launch, by the name of its field."""
OF_REQUESTS: Mapping[str, str] = {"entrypoint": "entrypoint", "rendezvous": "rendezvous", "run_id": "run-id"}
"""The keys of further values of a launch that a settings file may have, by the field of the request."""
URLS = "notify"
"""The key of the URLs of notifications. Files have only the places of URLs, because a URL is a secret."""
COMMAND_ONLY = {
    "columns": str,
    "tee": str,
    "json": bool,
    "dry-run": bool,
    "volume": list[str],
    "module": bool,
    "dashboard": bool,
}
ANY_BACKEND = ""


class _Text(str):
    """An argument as a text. The annotation of the entrypoint's parameter decides how it is read."""


@dataclass(frozen=True)
class FoundSettings:
    """All settings that files and the environment give for a launch, by their place in a file."""

    found: Mapping[Place, Setting]
    files: Sequence[str] = ()
    """The files that were read."""

    @property
    def values(self) -> dict[str, Any]:
        """The values of settings that are neither arguments of the entrypoint nor options of a backend, by key."""
        return {place[0]: setting.value for place, setting in self.found.items() if len(place) == 1}

    @property
    def arguments(self) -> tuple[dict[str, Any], dict[str, str]]:
        """The arguments of the entrypoint in two dictionaries: the values, and the same values as texts, which the
        annotations of the entrypoint may convert.
        """
        values: dict[str, Any] = {}
        texts: dict[str, str] = {}
        for place, setting in self.found.items():
            if place[0] == "args":
                value = setting.value
                text = value if isinstance(value, str) else json.dumps(value)
                if isinstance(value, _Text) or json_or_text(text) == value:
                    texts[place[1]] = text
                else:  # "5" is a text and stays one
                    values[place[1]] = value
        return values, texts

    def options(self, backend: str) -> dict[str, Any]:
        """Return the options of a backend. An option from a variable is an `OptionText`."""
        return {
            place[2]: setting.value if setting.text is None else OptionText(setting.text)
            for place, setting in self.found.items()
            if place[0] == "option" and place[1] in (backend, ANY_BACKEND)
        }

    def origins(self, backend: str) -> dict[str, str]:
        """Return the origin of each setting at a backend, by names such as `n`, `args.steps` and `option.region`."""
        return {
            ".".join(dict.fromkeys((place[0], place[-1]))): setting.origin
            for place, setting in self.found.items()
            if place[0] != "option" or place[1] in (backend, ANY_BACKEND)
        }


def read_settings(
    keys: Mapping[str, Any],
    *,
    config: Sequence[str | Path] = (),
    profile: str | None = None,
    entrypoint: str | Callable[..., Any] | None = None,
    backend: str | None = None,
) -> FoundSettings:
    """Return the settings that apply in this folder and environment.

    Args:
        keys: the names of all settings, with the type of each.
        config: files to read in addition to the files that are found, the strongest last. Default: none.
        profile: the profile to use. Default: no profile.
        entrypoint: the entrypoint that the launch itself gives. Default: none.
        backend: the backend that the launch itself gives. Default: none.

    Raises:
        ValueError: a file cannot be read or has an unknown setting, or no file has the profile.
        EntrypointError: the `# /// script` block of the entrypoint's file cannot be read.
    """
    config = config or shlex.split(os.environ.get("REPLICAS_CONFIG", ""))
    profile = (os.environ.get("REPLICAS_PROFILE") or None) if profile is None else profile
    files = [*found_files(), *(given_file(Path(file).absolute()) for file in config)]
    levels = [Level.of(table, str(path), path.parent, keys) for path, table in files]
    environment = _environment(keys)
    named = [level.profiles.get(profile or "", {}) for level in levels]
    settings = [environment, *reversed(named), *(level.values for level in reversed(levels))]
    chosen = entrypoint
    if chosen is None:  # an empty entrypoint is a mistake, which no setting corrects
        chosen = next((each[("entrypoint",)].value for each in settings if ("entrypoint",) in each), None)
    if header := header_level(chosen, keys):
        levels.insert(len(levels) - len(config), header)
    if profile is not None and not any(profile in level.profiles for level in levels):
        where = (
            f"Read: {', '.join(level.origin for level in levels)}." if levels else f"There is no {FILE} here or above."
        )
        raise ValueError(f"{unknown_name('profile', profile, {p for each in levels for p in each.profiles})} {where}")
    found: dict[Place, Setting] = {}
    for level in levels:
        found |= level.values
    for level in levels:
        found |= level.profiles.get(profile or "", {})
    if ("rendezvous",) in environment:  # the rendezvous of replicas on other machines
        from executors.launcher.several_backends import name_of

        where = backend or {**found, **environment}.get(("backend",), Setting("local", "")).value
        with contextlib.suppress(BackendError):
            if not getattr(executor_class(name_of(where)), "needs_shared_rendezvous", False):
                del environment[("rendezvous",)]
    return FoundSettings({**found, **environment}, [level.origin for level in levels])


def keys_of_launch() -> dict[str, Any]:
    """Return the names of all settings that `launch(config=…)` reads, with the type of each."""
    texts: dict[str, Any] = dict.fromkeys(("backend", *OF_REQUESTS.values()), str)
    texts[URLS] = list[str]
    return texts | {KEYS[name]: option.kind for name, option in OPTIONS.items()} | COMMAND_ONLY


def filled(
    executor: Any, asked: Mapping[str, Any], config: str | Path | bool | Sequence[str | Path], profile: str | None
) -> tuple[Any, dict[str, Any]]:
    """Return an executor and the fields of a request. Settings replace the fields that are at their defaults.

    Args:
        executor: the executor that the user gave, its name, or None.
        asked: the fields of the request by name, as the user gave them.
        config: the parameter `config` of `launch`.
        profile: the parameter `profile` of `launch`.
    """
    from executors.launcher.several_backends import executor_of, total_replicas
    from executors.registry import get_executor

    given = [config] if isinstance(config, str | Path) else [] if isinstance(config, bool) else list(config)
    name = executor if isinstance(executor, str) else getattr(executor, "backend_name", None)
    settings = read_settings(
        keys_of_launch(), config=given, profile=profile, entrypoint=asked["entrypoint"], backend=name
    )
    values, (args, texts) = settings.values, settings.arguments
    backend = str(name or values.get("backend", "local"))
    merged, origins = dict(asked), {}
    for field, key in {**OF_REQUESTS, **KEYS, URLS: URLS}.items():
        if key in values and merged[field] in (None, (), DEFAULTS.get(field)):
            merged[field] = values[key]
            origins[key] = settings.found[(key,)].origin
    if values.get("module") and merged["argv"] is None:
        merged["argv"] = []
    mine = asked.get("args") or {}
    if callable(merged["entrypoint"]):
        args, texts = {**args, **{name: json_or_text(text) for name, text in texts.items()}}, {}
    merged["args"] = {**args, **mine} or None
    merged["arg_texts"] = {name: text for name, text in texts.items() if name not in mine} or None
    if executor is None or isinstance(executor, str):

        def make(name: str) -> Any:
            options = read_options(executor_class(name), settings.options(name))
            if volumes := volumes_of(values.get("volume"), name):
                options["volumes"] = {**options.get("volumes", {}), **volumes}
            return get_executor(name, options)

        merged["n"] = total_replicas(backend, merged["n"])
        executor = executor_of(backend, make)
    others = settings.origins(backend)
    origins |= {name: others[name] for name in others if "." in name and name.removeprefix("args.") not in mine}
    merged["origins"] = origins
    return executor, merged


def volumes_of(texts: Sequence[str] | None, backend: str) -> dict[str, str]:
    """Return the volumes of texts such as `corpus:/data`, by the path at which each is mounted.

    Args:
        texts: the texts. None: there are none.
        backend: the backend that mounts the volumes.

    Raises:
        ValueError: a text has another form, or the backend mounts no volumes.
    """
    import inspect

    volumes = {}
    for text in texts or ():
        source, _, path = text.rpartition(":")
        if not source or not path.startswith("/"):
            raise ValueError(f"--volume {text!r} is not of the form NAME:/path. Write, for example, corpus:/data.")
        volumes[path] = source
    if volumes and "volumes" not in inspect.signature(executor_class(backend)).parameters:
        raise ValueError(f"Backend {backend!r} has no volumes. Remove --volume.")
    return volumes


def _environment(keys: Mapping[str, Any]) -> dict[Place, Setting]:
    """Return the settings of the environment.

    Raises:
        ValueError: a variable has a value of another type than its setting.
    """
    found: dict[Place, Setting] = {}
    for key, kind in {**keys, "arg": None, "option": None}.items():
        variable = f"REPLICAS_{key.upper().replace('-', '_')}"
        if not (text := os.environ.get(variable)):
            continue
        try:
            if kind is None:
                pairs = [pair.partition("=") for pair in shlex.split(text)]
                if bad := [name for name, equals, _ in pairs if not (name and equals)]:
                    raise ValueError(f"{bad[0]!r} is not of the form NAME=VALUE.")
                for name, _, value in pairs:
                    if key == "arg":
                        found[("args", name)] = Setting(_Text(value), variable)
                    else:
                        found[("option", ANY_BACKEND, name)] = Setting(json_or_text(value), variable, value)
            elif kind is Duration:
                found[(key,)] = Setting(parse_duration(text), variable)
            else:
                found[(key,)] = Setting(shlex.split(text) if kind == list[str] else convert(text, kind), variable)
        except ValueError as error:
            takes = f" takes {describe_annotation(kind)}, got {text!r}." if kind in (int, float, bool) else f": {error}"
            raise ValueError(f"{variable}{takes}") from None
    return found
