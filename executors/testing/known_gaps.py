"""`expected_failures`: the tests of a contract that a backend is known not to pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest


class KnownGaps:
    """A contract suite whose subclasses may name what they do not keep."""

    expected_failures: ClassVar[Mapping[str, str]] = {}
    """Test name -> reason. Such a test is a strict xfail: when it passes, the entry has to go."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, reason in cls.__dict__.get("expected_failures", {}).items():
            test = getattr(cls, name, None)
            if test is None:
                raise TypeError(f"{cls.__name__}.expected_failures names {name!r}, which is no test of this contract.")
            setattr(cls, name, pytest.mark.xfail(reason=reason, strict=True)(_copy(test)))


def _copy(test: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a test, so that a mark on it does not reach other subclasses."""

    @functools.wraps(test)
    def copy(*args: Any, **kwargs: Any) -> Any:
        return test(*args, **kwargs)

    return copy
