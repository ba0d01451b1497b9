"""The request of a launch: the entrypoint with its arguments, the store, and the settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from executors.settings import Settings
from executors.settings.settings import DEFAULTS
from executors.store.url import check_run_id, check_scheme, new_run_id
from executors.task.command import Command
from executors.task.entrypoint import describe

VARIABLE = re.compile(r"[^\s=\0]+")
KINDS: dict[str, tuple[Any, str]] = {
    "args": (Mapping, "must map names to values, as in {'steps': 100}"),
    "env": (Mapping, "must map names to strings, as in {'STAGE': 'test'}"),
    "rendezvous": (str | Path, "must be the url of a store, or a directory"),
    "run_id": (str, "must be a name, as in 'first-try'"),
}
"""The type of each value, and its description for an error."""


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """The request of a launch. The constructor checks the values, which `launch` describes.

    Raises:
        TypeError, ValueError: a value is not legal. The message names it.

    Example:
        LaunchRequest.of("train.py:main", n=4, args={"steps": 100})
    """

    entrypoint: str | Callable[..., Any]
    settings: Settings
    args: Mapping[str, Any] | None = None
    arg_texts: Mapping[str, str] | None = None
    """Arguments as texts of a command line, for the entrypoint's annotations. `args` has their values as well."""
    argv: Sequence[str] | None = None
    """The arguments of a file or module that is run as a script. None: the entrypoint is a function."""
    rendezvous: str | Path | None = None
    run_id: str | None = None
    env: Mapping[str, str] | None = None
    notify: Sequence[str] = field(default=(), repr=False)
    """The URLs to which notifications are sent, or the places of URLs. They are secrets, and are never recorded."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """The origin of each value, by its name: a flag, an environment variable or a file."""

    @classmethod
    def of(cls, entrypoint: str | Callable[..., Any], **given: Any) -> Self:
        """Return a request for an entrypoint.

        Args:
            entrypoint: the callable, or its name.
            given: fields of a request, and settings by name, as `launch()` takes them.

        Raises:
            TypeError, ValueError: a value is not legal. The message names it.

        Example:
            LaunchRequest.of("train.py:main", n=4, gpu="H100", env={"STAGE": "test"})
        """
        settings = {name: given.pop(name) for name in DEFAULTS if name in given}
        return cls(entrypoint=entrypoint, settings=Settings.of(**{"n": None, **settings}), **given)

    def with_settings(self, **changes: Any) -> Self:
        """Return the request with some settings changed.

        Args:
            changes: settings by name, with values as `Settings` has them.

        Example:
            request.with_settings(timeout=3600.0)
        """
        return replace(self, settings=replace(self.settings, **changes))

    def with_run_id(self) -> Self:
        """Return the request with a run id. If the user gave none, a new one is made.

        Example:
            LaunchRequest.of("train.py:main", n=2).with_run_id().run_id  # "brave-otter-7f3a"
        """
        return self if self.run_id is not None else replace(self, run_id=new_run_id())

    def __post_init__(self) -> None:
        if not isinstance(self.entrypoint, str) and not callable(self.entrypoint):
            raise TypeError(
                f"entrypoint must be a callable or the name of one, as in 'train.py:main', got {self.entrypoint!r}."
            )
        for name, (kinds, words) in KINDS.items():
            if (value := getattr(self, name)) is not None and not isinstance(value, kinds):
                raise TypeError(f"{name} {words}, got {value!r}.")
        if isinstance(self.entrypoint, Command):
            self._check_command()
        elif self.argv is not None:
            self._check_script()
        if self.rendezvous is not None:
            check_scheme(self.rendezvous)
        if str(self.rendezvous).startswith("memory:"):
            raise ValueError(
                f"rendezvous={str(self.rendezvous)!r} exists only in this process, so replicas cannot read it. Give a "
                "directory or the url of a bucket."
            )
        for name, value in (self.env or {}).items():
            if not (isinstance(name, str) and isinstance(value, str)) or "\0" in value:
                raise ValueError(f"env must map names to strings, got {name!r}: {type(value).__name__}.")
            if not VARIABLE.fullmatch(name):
                raise ValueError(f"env must have names of variables, as in {{'STAGE': 'test'}}, got {name!r}.")
        if self.run_id is not None:
            check_run_id(self.run_id)

    def _check_command(self) -> None:
        if self.args or self.arg_texts or self.argv:
            raise ValueError(
                f"A command has all its arguments in itself, got args for {str(self.entrypoint)!r}. Remove args, argv "
                "and --arg, and write the arguments behind the program."
            )

    def _check_script(self) -> None:
        if isinstance(self.argv, str) or not all(isinstance(text, str) for text in self.argv or ()):
            raise TypeError(f"argv must be a list of strings, as in ['--lr', '1e-3'], got {self.argv!r}.")
        if self.args or self.arg_texts:
            raise ValueError(
                "args are for a function and argv is for a script. Give one of them: --arg, or options after --."
            )
        if not isinstance(self.entrypoint, str) or ":" in self.entrypoint:
            raise ValueError(
                f"argv, or options after --, need a file or module that is run as a script, as in 'train.py' or "
                f"'pkg.train', got {describe(self.entrypoint)!r}."
            )
