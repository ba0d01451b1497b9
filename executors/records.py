"""Records as JSON objects in a store. Anybody may have written them: each is bounded, and read field by field.

A record has a type of its own with a `parse` that takes what stands in the store and raises `CorruptObjectError`, with
the name of the field that does not fit. Fields that are not known are passed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from executors.errors import CorruptObjectError, KeyNotFoundError
from executors.store import Store

MAX_RECORD_BYTES = 1 << 20
MAX_DEPTH = 220  # results may have 200
MAX_TEXT = 64 * 1024  # characters
MAX_SHOWN = 60  # characters of a bad value in a message
LONG_AGO, FAR_AHEAD = 0.0, 1e11  # seconds since the epoch: until the year 5138

T = TypeVar("T")
Parse = Callable[[Any, str, str], T]
"""From an object's bytes, its key and its store's url to a record."""
Check = Callable[[Any], T]
"""From a JSON value to the same value, typed. Raises ValueError, with what was expected."""


def to_bytes(record: Any) -> bytes:
    """Encode a record: UTF-8, one line."""
    return (json.dumps(record) + "\n").encode()


def read_json(store: Store, key: str, max_bytes: int = MAX_RECORD_BYTES) -> Any:
    """Read a JSON object, whatever is in it.

    Raises:
        KeyNotFoundError: nothing stands there.
        CorruptObjectError: what stands there is no JSON, or larger than `max_bytes`.
    """
    return _decode(get_at_most(store, key, max_bytes), key, store.url)


def find_json(store: Store, key: str) -> Any | None:
    """Read a JSON object, or None when nothing stands there."""
    try:
        return read_json(store, key)
    except KeyNotFoundError:
        return None


def read_record(store: Store, key: str, parse: Parse[T], max_bytes: int = MAX_RECORD_BYTES) -> T:
    """Read a record.

    Raises:
        KeyNotFoundError: nothing stands there.
        CorruptObjectError: what stands there is no such record, or larger than `max_bytes`.
    """
    return parse(get_at_most(store, key, max_bytes), key, store.url)


def find_record(store: Store, key: str, parse: Parse[T], max_bytes: int = MAX_RECORD_BYTES) -> T | None:
    """Read a record, or None when nothing stands there."""
    try:
        return read_record(store, key, parse, max_bytes)
    except KeyNotFoundError:
        return None


def exists(store: Store, key: str) -> bool:
    """Tell whether an object stands under `key`."""
    try:
        store.get(key, size=0)
    except KeyNotFoundError:
        return False
    return True


def get_at_most(store: Store, key: str, max_bytes: int) -> memoryview:
    """Return an object; one that is too large is refused, where the store can before it is read."""
    bounded = getattr(store, "get_at_most", None)
    if bounded is not None:
        return bounded(key, max_bytes)  # type: ignore[no-any-return]
    data = store.get(key)
    if len(data) > max_bytes:
        raise CorruptObjectError(
            f"{key!r} in {store.url} has {len(data)} bytes, at most {max_bytes} were expected.", key=key, url=store.url
        )
    return data


class Fields:
    """The fields of a JSON object of a store, read one by one.

    Args:
        data: what stands in the store, or the object itself.

    Raises:
        CorruptObjectError: the data is no JSON object.
    """

    def __init__(self, data: Any, key: str, url: str = "") -> None:
        self._key = key
        self._url = url
        self.values: Mapping[str, Any] = data if isinstance(data, dict) else _decode(data, key, url)
        if not isinstance(self.values, dict):
            raise self.refusal(f"it is {_shown(self.values)}, a JSON object was expected")

    def take(self, name: str, check: Check[T], *default: T) -> T:
        """Return a field, or the default when it is missing.

        Raises:
            CorruptObjectError: it is missing and there is no default, or it is not what the check expects.
        """
        if name not in self.values:
            if default:
                return default[0]
            raise self.refusal(f"{name!r} is missing")
        try:
            return check(self.values[name])
        except ValueError as expected:
            raise self.refusal(f"{name!r} is {_shown(self.values[name])}, {expected} was expected") from None

    def refusal(self, why: str) -> CorruptObjectError:
        """Return the error that says why the whole record is refused."""
        where = f"{self._key!r} in {self._url}" if self._url else repr(self._key)
        return CorruptObjectError(f"{where} cannot be read: {why}.", key=self._key, url=self._url or None)


def integer(least: int, most: int) -> Check[int]:
    """Expect an integer, which a bool is not."""

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"an integer from {least} to {most}")
        return value

    return check


def number(least: float = -1e300, most: float = 1e300) -> Check[float]:
    """Expect a finite number."""

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise ValueError(f"a number from {least:g} to {most:g}")
        return float(value)

    return check


def text(max_characters: int = MAX_TEXT, pattern: re.Pattern[str] | None = None) -> Check[str]:
    """Expect a string, perhaps one that a pattern matches whole. Lone surrogates are replaced: none can be printed."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or len(value) > max_characters:
            raise ValueError(f"a string of at most {max_characters} characters")
        if pattern is not None and not pattern.fullmatch(value):
            raise ValueError(f"a string like {pattern.pattern}")
        return value.encode(errors="replace").decode()

    return check


def flag(value: Any) -> bool:
    """Expect true or false."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def one_of(*words: str) -> Check[str]:
    """Expect one of some words."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return value

    return check


def list_of(each: Check[T]) -> Check[tuple[T, ...]]:
    """Expect a list of such values."""

    def check(value: Any) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise ValueError("a list")
        try:
            return tuple(each(item) for item in value)
        except ValueError as expected:
            raise ValueError(f"a list, each item {expected},") from None

    return check


def json_object(value: Any) -> dict[str, Any]:
    """Expect a JSON object, whatever is in it."""
    if not isinstance(value, dict):
        raise ValueError("a JSON object")
    return value


def anything(value: Any) -> Any:
    """Expect any JSON value."""
    return value


def nullable(check: Check[T]) -> Check[T | None]:
    """Expect null, or what another check does."""

    def check_or_none(value: Any) -> T | None:
        try:
            return None if value is None else check(value)
        except ValueError as expected:
            raise ValueError(f"null or {expected}") from None

    return check_or_none


def is_plain_number(value: Any) -> bool:
    """Tell whether a value is a number that can be shown and compared; NaN is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value != value or abs(value) < 1e300  # in this order: an integer may be too large for a float


def _decode(data: Any, key: str, url: str) -> Any:
    where = f"{key!r} in {url}" if url else repr(key)
    try:
        value = json.loads(bytes(data))
    except ValueError as error:
        raise CorruptObjectError(f"{where} is no JSON: {error}", key=key, url=url or None) from None
    except RecursionError:
        value = None
    else:
        if not is_deeper_than(value, MAX_DEPTH):
            return value
    raise CorruptObjectError(f"{where} is nested deeper than {MAX_DEPTH}.", key=key, url=url or None)


def is_deeper_than(value: Any, depth: int) -> bool:
    """Tell whether a JSON value is nested deeper: whoever walks through it recursively might run out of stack."""
    level = [value]
    for _ in range(depth + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, list | tuple | dict)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, list | tuple | dict)
        ]
        if not level:
            return False
    return True


def _shown(value: Any) -> str:
    """Show a value in a message: never more than a few words of it, and nothing that is nested."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return repr(value if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]}…")
    shown = json.dumps(value)
    return shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}…"
