"""Helpers of the contract suites: waits for a state, expected failures, cleanups, and helper processes."""

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
    """A contract suite whose subclasses may name the tests that they are known to fail.

    Raises:
        TypeError: `expected_failures` names a test that does not exist.

    Example:
        class TestMyStore(StoreContract):
            expected_failures = {"test_an_entry_has_size_and_time": "its clock is wrong"}
    """

    expected_failures: ClassVar[Mapping[str, str]] = {}
    """The reason for each test that is expected to fail, by the name of the test. If such a test passes, that is an
    error (strict xfail).
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, reason in cls.__dict__.get("expected_failures", {}).items():
            test = getattr(cls, name, None)
            if test is None:
                raise TypeError(
                    f"{cls.__name__}.expected_failures names {name!r}, which is not a test of this contract. Correct "
                    "the name."
                )
            # The mark is put on a copy of the test, because other subclasses share the test.
            copy = types.FunctionType(test.__code__, test.__globals__, name, test.__defaults__, test.__closure__)
            setattr(cls, name, pytest.mark.xfail(reason=reason, strict=True)(functools.update_wrapper(copy, test)))


class JobCleanup:
    """A contract suite that ends the jobs of its tests, also of failed tests. At a service they would cost money.

    Example:
        self.add_cleanup(partial(executor.cancel, handle))
    """

    def add_cleanup(self, act: Callable[[], object]) -> None:
        """Add a function to call when the test has ended, while its fixtures still exist.

        Args:
            act: the function.
        """
        self.__dict__.setdefault("_acts", []).append(act)

    def run_cleanups(self) -> None:
        """Call the functions that tests have added. Errors of these functions are ignored, because a failed test shows
        the cause.
        """
        for act in self.__dict__.pop("_acts", []):
            with contextlib.suppress(Exception):
                act()


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment for a new Python process, which gets the `sys.path` of this process.

    Args:
        more: more variables.

    Example:
        subprocess.run([sys.executable, "job.py"], env=environment(MODE="test"))
    """
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **more}


@contextlib.contextmanager
def python_process(script: Path, *args: str) -> Iterator[Helper]:
    """Run a Python script with pipes for stdin and stdout, and kill it when the block ends.

    Args:
        script: the script.
        args: the arguments of the script.

    Example:
        with python_process(Path("writer.py"), "key") as process:
            receive(process)
    """
    command = [sys.executable, "-P", str(script), *args]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def receive(process: Helper) -> Any:
    """Wait for the next line of JSON from a process, and return its value.

    Args:
        process: the process.

    Raises:
        AssertionError: the process has ended without a further line.

    Example:
        receive(process)
    """
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the process ended with {process.wait()} and sent nothing"
    return json.loads(line)


def send(process: Helper, line: str) -> None:
    """Send a line to the stdin of a process.

    Args:
        process: the process.
        line: the line, without its end.

    Example:
        send(process, "go")
    """
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
