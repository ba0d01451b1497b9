"""JSON records in a store: read, found, and checked field by field.

Any process may have written a record, so each is bounded. A record's type has a `parse` that takes an object's bytes
and raises `CorruptObjectError` with the name of the field that does not fit. Unknown fields are ignored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

from executors.errors import CorruptObjectError, KeyNotFoundError, StoreError
from executors.store.protocol import Store, check_size

MAX_RECORD_BYTES = 1 << 20
MAX_DEPTH = 220  # results may have 200
TOO_DEEP = f"it is nested deeper than {MAX_DEPTH}"
MAX_TEXT = 64 * 1024  # characters
MAX_SHOWN = 60  # characters of a bad value in a message
SHA256 = re.compile(r"[0-9a-f]{64}")
LONG_AGO, FAR_AHEAD = 0.0, 1e11  # seconds since the epoch: until the year 5138
GONE_PAUSES_S = (1.0, 1.0, 0.0)

T = TypeVar("T")
Parse = Callable[[Any, str, str], T]
"""From an object's bytes, its key and its store's url to a record."""
Check = Callable[[Any], T]
"""From a JSON value to the same value, typed. Raises ValueError with what was expected."""


def to_bytes(record: Any) -> bytes:
    """Encode a record: UTF-8, one line."""
    return (json.dumps(record) + "\n").encode()


def read_record(store: Store, key: str, parse: Parse[T], max_bytes: int = MAX_RECORD_BYTES) -> T:
    """Return a record.

    Raises:
        KeyNotFoundError: there is no object.
        CorruptObjectError: the object is not such a record, or larger than `max_bytes`.
    """
    return parse(get_at_most(store, key, max_bytes), key, store.url)


def find_record(store: Store, key: str, parse: Parse[T], max_bytes: int = MAX_RECORD_BYTES) -> T | None:
    """Return a record, or None when there is no object."""
    with contextlib.suppress(KeyNotFoundError):
        return read_record(store, key, parse, max_bytes)
    return None


def exists(store: Store, key: str) -> bool:
    """Return whether there is an object under `key`."""
    with contextlib.suppress(KeyNotFoundError):
        store.get(key, size=0)
        return True
    return False


def is_gone(store: Store, key: str) -> bool:
    """Return whether an object that was there was deleted: one stale answer does not count, and no failure does."""
    with contextlib.suppress(StoreError):
        for pause_s in GONE_PAUSES_S:
            if exists(store, key):
                return False
            time.sleep(pause_s)
        return True
    return False


def get_at_most(store: Store, key: str, max_bytes: int) -> memoryview:
    """Return an object; one that is too large is refused, by a `BoundedStore` before it is read.

    Raises:
        KeyNotFoundError: there is no object.
        CorruptObjectError: it has more than `max_bytes` bytes.
    """
    bounded = getattr(store, "get_at_most", None)
    if bounded is not None:
        return bounded(key, max_bytes)  # type: ignore[no-any-return]
    data = store.get(key)
    check_size(key, store.url, len(data), max_bytes)
    return data


class Fields:
    """The fields of a JSON object, read one by one.

    Args:
        data: the object's bytes, or the decoded object.

    Raises:
        CorruptObjectError: the data is not a JSON object.
    """

    def __init__(self, data: Any, key: str, url: str = "") -> None:
        self._key = key
        self._url = url
        try:
            self.values: Mapping[str, Any] = data if isinstance(data, dict) else json.loads(bytes(data))
        except ValueError as error:
            raise self.refusal(f"it is not JSON: {error}") from None
        except RecursionError:
            raise self.refusal(TOO_DEEP) from None
        if data is not self.values and is_deeper_than(self.values, MAX_DEPTH):
            raise self.refusal(TOO_DEEP)
        if not isinstance(self.values, dict):
            raise self.refusal(f"it is {_shown(self.values)}, a JSON object was expected")

    def take(self, name: str, check: Check[T], *default: T) -> T:
        """Return a field, or the default when it is missing.

        Raises:
            CorruptObjectError: the field is missing without a default, or fails the check.
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
        """Return the error for a whole record."""
        where = f"{self._key!r} in {self._url}" if self._url else repr(self._key)
        return CorruptObjectError(f"{where} cannot be read: {why}.", key=self._key, url=self._url or None)


class Record:
    """A record whose dataclass fields declare with `checked` what the store may hold."""

    @classmethod
    def parse(cls, data: Any, key: str = "the record", url: str = "") -> Self:
        """Parse what the store holds under the key.

        Raises:
            CorruptObjectError: it is not such a record; the message names what of it does not fit.
        """
        fields = Fields(data, key, url)
        given = {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            is_needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if is_needed or field.name in fields.values:
                given[field.name] = fields.take(field.name, field.metadata["check"])
        return cls(**given)


def checked(check: Check[Any], *default: Any) -> Any:
    """Declare a field of a `Record`: what its value has to be, and its default where it may be missing."""
    if not default:
        return dataclasses.field(metadata={"check": check})
    return dataclasses.field(default_factory=lambda: default[0], metadata={"check": check})


def nested(record: type[Record]) -> Check[Any]:
    """Expect an object that is a record itself."""

    def check(value: Any) -> Any:
        try:
            return record.parse(json_object(value))
        except CorruptObjectError as error:
            raise ValueError(f"a record inside ({error})") from None

    return check


def _expect(words: str, fits: Callable[[Any], bool]) -> Check[Any]:
    def check(value: Any) -> Any:
        if not fits(value):
            raise ValueError(words)
        return value

    return check


def integer(least: int, most: int) -> Check[int]:
    """Expect an integer; a bool is not one."""
    kind = f"an integer from {least} to {most}"
    return _expect(kind, lambda v: isinstance(v, int) and not isinstance(v, bool) and least <= v <= most)


def number(least: float = -1e300, most: float = 1e300) -> Check[float]:
    """Expect a finite number."""
    fits = _expect(f"a number from {least:g} to {most:g}", lambda v: is_plain_number(v) and least <= v <= most)
    return lambda value: float(fits(value))


def text(max_characters: int = MAX_TEXT, pattern: re.Pattern[str] | None = None) -> Check[str]:
    """Expect a string that the whole pattern matches. Lone surrogates, which cannot be printed, are replaced."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or len(value) > max_characters:
            raise ValueError(f"a string of at most {max_characters} characters")
        if pattern is not None and not pattern.fullmatch(value):
            raise ValueError(f"a string like {pattern.pattern}")
        return value.encode(errors="replace").decode()

    return check


def parsed(parse: Callable[[str], Any]) -> Check[str]:
    """Expect a text that parses, and take it as what it means is written."""

    def check(value: Any) -> str:
        return str(parse(text(400)(value)))

    return check


def one_of(*words: str) -> Check[str]:
    """Expect one of some words."""
    return _expect(f"one of {', '.join(words)}", lambda value: isinstance(value, str) and value in words)


flag: Check[bool] = _expect("true or false", lambda value: isinstance(value, bool))
json_object: Check[dict[str, Any]] = _expect("a JSON object", lambda value: isinstance(value, dict))


def anything(value: Any) -> Any:
    """Expect any JSON value."""
    return value


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


def nullable(check: Check[T]) -> Check[T | None]:
    """Expect null, or a value that another check takes."""

    def check_or_none(value: Any) -> T | None:
        try:
            return None if value is None else check(value)
        except ValueError as expected:
            raise ValueError(f"null or {expected}") from None

    return check_or_none


def is_plain_number(value: Any) -> bool:
    """Return whether a value is a number that can be shown and compared; NaN is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value != value or abs(value) < 1e300  # in this order: an integer may be too large for a float


def is_json(value: Any) -> bool:
    """Return whether a value can be written as JSON."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def is_deeper_than(value: Any, depth: int) -> bool:
    """Return whether a JSON value is nested deeper, so that recursive code might run out of stack."""
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
    """Return a value for a message: at most `MAX_SHOWN` characters, and nothing nested."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    shown = value if isinstance(value, str) else json.dumps(value)
    shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}…"
    return repr(shown) if isinstance(value, str) else shown
