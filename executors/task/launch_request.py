"""What somebody asks of a launch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from executors.native import GATHER_S
from executors.store.records import FAR_AHEAD
from executors.store.url import check_run_id, check_scheme
from executors.task.entrypoint import describe
from executors.task.policy import HangLimits, Restarts
from executors.task.record import MAX_WORLD_SIZE

VARIABLE = re.compile(r"[^\s=\0]+")
KINDS: dict[str, tuple[Any, str]] = {
    "args": (Mapping, "maps names to values, as in {'steps': 100}"),
    "env": (Mapping, "maps names to strings, as in {'STAGE': 'test'}"),
    "rendezvous": (str | Path, "is the url of a store, or a directory"),
    "run_id": (str, "is a name, as in 'first-try'"),
    "gpu": (str, "names a GPU, as in 'H100' or 'H100:2'"),
    "timeout": (int | float, "is a number of seconds"),
    "seed": (int, "is an integer"),
    "tracker": (str, "is a name, as in 'trackio' or 'pkg.mod:Class'"),
    "health_check": (str, "names a function, as 'pkg.mod:f'"),
    "signed": (bool, "is True or False"),
    "from_run": (str, "names a run, as 'first-try' or 's3://BUCKET/runs/first-try'"),
    "from_step": (int, "is a step of that run"),
}
"""What a value is, where there is one."""


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """What somebody asks of a launch. Its values are checked when it is made; `launch` says what they mean.

    Raises:
        TypeError, ValueError: a value cannot be asked for.
    """

    entrypoint: str | Callable[..., Any]
    n: int
    args: Mapping[str, Any] | None = None
    arg_texts: Mapping[str, str] | None = None
    """Arguments as texts of a command line, which the entrypoint's annotations explain; `args` then has their values.
    """
    argv: Sequence[str] | None = None
    """The entrypoint is a file or a module, run as a script with these arguments."""
    rendezvous: str | Path | None = None
    run_id: str | None = None
    gpu: str | None = None
    timeout: float | None = None
    max_cost: float | None = None
    env: Mapping[str, str] | None = None
    secrets: Sequence[str] = ()
    seed: int | None = None
    detach: bool = False
    chaos: Sequence[str] = ()
    min_replicas: int | None = None
    gather_s: float = GATHER_S
    fail_fast: bool = False
    tracker: str | None = None
    restarts: Restarts | str | None = None
    hang_timeout: str | None = None
    start_timeout: str | None = None
    spares: int = 0
    health_check: str | None = None
    signed: bool = False
    from_run: str | None = None
    """The run whose model and outer state this one begins with."""
    from_step: int | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    """Who said what: a flag, a variable of the environment, a file."""

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int):
            raise TypeError(f"n is an integer, got n={self.n!r}.")
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got n={self.n!r}.")
        if self.n > MAX_WORLD_SIZE:
            raise ValueError(f"n must be at most {MAX_WORLD_SIZE}, got n={self.n!r}.")
        if not isinstance(self.entrypoint, str) and not callable(self.entrypoint):
            raise TypeError(
                f"entrypoint is a callable or the name of one, as in 'train.py:main', got {self.entrypoint!r}."
            )
        for name, (kinds, words) in KINDS.items():
            if (value := getattr(self, name)) is not None and not isinstance(value, kinds):
                raise TypeError(f"{name} {words}, got {value!r}.")
        for name in ("secrets", "chaos"):
            if isinstance(value := getattr(self, name), str):
                raise TypeError(f"{name} is a list of strings, as in [{value!r}], got a string.")
        if self.argv is not None:
            self._check_script()
        if self.max_cost is not None and not (isinstance(self.max_cost, int | float) and self.max_cost > 0):
            raise ValueError(f"max_cost is a number of US dollars, more than 0, got {self.max_cost!r}.")
        if self.rendezvous is not None:
            check_scheme(self.rendezvous)
        if str(self.rendezvous).startswith("memory:"):
            raise ValueError(
                f"rendezvous={str(self.rendezvous)!r} lives in this process alone; replicas could not see it."
            )
        for name, value in (self.env or {}).items():
            if not (isinstance(name, str) and isinstance(value, str)) or "\0" in value:
                raise ValueError(f"env maps names to strings, got {name!r}: {type(value).__name__}.")
            if not VARIABLE.fullmatch(name):
                raise ValueError(f"env names variables, as in {{'STAGE': 'test'}}, got {name!r}.")
        if self.min_replicas is not None and not (type(self.min_replicas) is int and 1 <= self.min_replicas <= self.n):
            raise ValueError(f"min_replicas is from 1 to n={self.n}, got min_replicas={self.min_replicas!r}.")
        if not isinstance(self.gather_s, int | float) or not 0 <= self.gather_s < FAR_AHEAD:
            raise ValueError(f"gather_s is a number of seconds, got gather_s={self.gather_s!r}.")
        (
            Restarts.of(self.restarts),
            HangLimits.of(self.hang_timeout, self.start_timeout),
        )
        if type(self.spares) is not int or not 0 <= self.spares <= MAX_WORLD_SIZE:
            raise ValueError(f"spares is a number from 0 to {MAX_WORLD_SIZE}, got spares={self.spares!r}.")
        if self.from_step is not None and (self.from_run is None or self.from_step < 0):
            raise ValueError(
                f"from_step (--from-step) is a step of the run that from_run (--from) names, and at least 0, got "
                f"from_step={self.from_step} and from_run={self.from_run!r}."
            )
        if self.run_id is not None:
            check_run_id(self.run_id)

    def _check_script(self) -> None:
        if isinstance(self.argv, str) or not all(isinstance(text, str) for text in self.argv or ()):
            raise TypeError(f"argv is a list of strings, as in ['--lr', '1e-3'], got {self.argv!r}.")
        if self.args or self.arg_texts:
            raise ValueError(
                "args go to a function and argv to a script: give one of them (--arg, or what follows --)."
            )
        if not isinstance(self.entrypoint, str) or ":" in self.entrypoint:
            raise ValueError(
                f"argv, or what follows --, goes to a file or module that is run as a script, as in 'train.py' or "
                f"'pkg.train', got {describe(self.entrypoint)!r}."
            )
