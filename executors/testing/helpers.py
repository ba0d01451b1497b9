"""Helpers of the contracts: waiting for something to become true, expected failures, and helper processes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar

import pytest

T = TypeVar("T")
Helper: TypeAlias = "subprocess.Popen[str]"


def eventually(look: Callable[[], T], what: str = "", *, within_s: float = 60.0, every_s: float = 0.02) -> T:
    """Call a function again and again until it returns a true value, and return this value.

    Example:
        eventually(lambda: path.exists(), "the file exists", within_s=5.0)

    Args:
        look: the function to call.
        what: the expected state, for the message of the error. Default: the name of the function.
        within_s: the longest wait in seconds.
        every_s: the pause between two calls in seconds.

    Raises:
        AssertionError: no true value came in time. The message has `what`, and the last value.
    """
    deadline = time.monotonic() + within_s
    while not (seen := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"Not within {within_s:g} s: {what or getattr(look, '__name__', look)} (saw {seen!r})")
        time.sleep(every_s)
    return seen


class KnownGaps:
    """A contract suite whose subclasses may name the tests that they fail."""

    expected_failures: ClassVar[Mapping[str, str]] = {}
    """Test name -> reason. Such a test is a strict xfail: when it passes, the entry has to go."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, reason in cls.__dict__.get("expected_failures", {}).items():
            test = getattr(cls, name, None)
            if test is None:
                raise TypeError(f"{cls.__name__}.expected_failures names {name!r}, not a test of this contract.")
            # A copy, so that the mark does not reach other subclasses.
            copy = types.FunctionType(test.__code__, test.__globals__, name, test.__defaults__, test.__closure__)
            setattr(cls, name, pytest.mark.xfail(reason=reason, strict=True)(functools.update_wrapper(copy, test)))


class JobCleanup:
    """A contract suite that ends the jobs of its tests, also of failed tests: at a service they would run, and cost."""

    def add_cleanup(self, act: Callable[[], object]) -> None:
        """Call this when the test has ended, before what it tests is gone."""
        self.__dict__.setdefault("_acts", []).append(act)

    def run_cleanups(self) -> None:
        """Call the functions for the end of a test. Their errors are ignored, because the test shows the cause."""
        for act in self.__dict__.pop("_acts", []):
            with contextlib.suppress(Exception):
                act()


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment, with its `sys.path` for a Python that is started with it."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **more}


@contextlib.contextmanager
def python_process(script: Path, *args: str) -> Iterator[Helper]:
    """Run a script with pipes; kill it when the block is left."""
    command = [sys.executable, "-P", str(script), *args]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def receive(process: Helper) -> Any:
    """Wait for the next line of JSON from a process, and return its value."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the process ended with {process.wait()} and sent nothing"
    return json.loads(line)


def send(process: Helper, line: str) -> None:
    """Send a line to a process."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
