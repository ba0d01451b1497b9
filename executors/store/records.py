"""Reads JSON records from a store, and checks them field by field.

Any process may have written a record, so the size of each is limited. The type of a record has a method `parse`. It
takes the bytes of an object, and raises `CorruptObjectError` with the name of a field that is wrong. Unknown fields are
ignored.
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
MAX_DEPTH = 220  # the deepest nesting: a result may have 200 levels, and its record adds some
TOO_DEEP = f"it is nested deeper than {MAX_DEPTH}"
MAX_TEXT = 64 * 1024  # characters
MAX_SHOWN = 60  # characters of a bad value in a message
SHA256 = re.compile(r"[0-9a-f]{64}")
LONG_AGO, FAR_AHEAD = 0.0, 1e11  # seconds since the epoch: until the year 5138
GONE_PAUSES_S = (1.0, 1.0, 0.0)  # the pauses after three looks for an object that may have been deleted

T = TypeVar("T")
Parse = Callable[[Any, str, str], T]
"""A function that makes a record from the bytes of an object, its key, and the url of its store."""
Check = Callable[[Any], T]
"""A function that returns a JSON value as a typed value. It raises ValueError with the expected kind of value as its
text.
"""


def to_bytes(record: Any) -> bytes:
    """Return a record as one line of JSON in UTF-8.

    Args:
        record: the record, as JSON values.

    Example:
        store.put(key, to_bytes({"step": 3}))
    """
    return (json.dumps(record) + "\n").encode()


def read_record(store: Store, key: str, parse: Parse[T], max_bytes: int = MAX_RECORD_BYTES) -> T:
    """Read a record from a store.

    Args:
        store: the store.
        key: the key of the record.
        parse: makes the record of the object's bytes, its key and the store's url.
        max_bytes: the largest size to accept. Default: 1 MiB.

    Raises:
        KeyNotFoundError: the key has no object.
        CorruptObjectError: the object is not such a record, or has more than `max_bytes` bytes.

    Example:
        read_record(store, run_record_key("brave-otter-7f3a"), RunRecord.parse)
    """
    return parse(get_at_most(store, key, max_bytes), key, store.url)


def find_record(store: Store, key: str, parse: Parse[T], max_bytes: int = MAX_RECORD_BYTES) -> T | None:
    """Read a record as `read_record` does. Return None if the key has no object.

    Args:
        store: the store.
        key: the key of the record.
        parse: makes the record of the object's bytes, its key and the store's url.
        max_bytes: the largest size to accept. Default: 1 MiB.

    Raises:
        CorruptObjectError: the object is not such a record, or has more than `max_bytes` bytes.

    Example:
        find_record(store, run_record_key("brave-otter-7f3a"), RunRecord.parse)
    """
    with contextlib.suppress(KeyNotFoundError):
        return read_record(store, key, parse, max_bytes)
    return None


def exists(store: Store, key: str) -> bool:
    """Return True if a key has an object.

    Args:
        store: the store.
        key: the key.

    Example:
        exists(store, "otter/run.json")
    """
    with contextlib.suppress(KeyNotFoundError):
        store.get(key, size=0)
        return True
    return False


def is_gone(store: Store, key: str) -> bool:
    """Return True if an object that existed was deleted. It looks three times within two seconds.

    A single answer may be out of date, so several are needed. A store that fails gives False.

    Args:
        store: the store.
        key: the key of the object.

    Example:
        is_gone(store, "otter/run.json")
    """
    with contextlib.suppress(StoreError):
        for pause_s in GONE_PAUSES_S:
            if exists(store, key):
                return False
            time.sleep(pause_s)
        return True
    return False


def get_at_most(store: Store, key: str, max_bytes: int) -> memoryview:
    """Return an object that is not larger than its reader expects. A `BoundedStore` refuses others before reading them.

    Args:
        store: the store.
        key: the key of the object.
        max_bytes: the largest size to accept.

    Raises:
        KeyNotFoundError: the key has no object.
        CorruptObjectError: the object has more than `max_bytes` bytes.

    Example:
        get_at_most(store, "otter/run.json", 1 << 20)
    """
    bounded = getattr(store, "get_at_most", None)
    if bounded is not None:
        return bounded(key, max_bytes)  # type: ignore[no-any-return]
    data = store.get(key)
    check_size(key, store.url, len(data), max_bytes)
    return data


class Fields:
    """Reads the fields of a JSON object one by one.

    Args:
        data: the object's bytes, or the decoded object.
        key: the key of the object, for messages.
        url: the url of its store, for messages. Default: messages name no store.

    Raises:
        CorruptObjectError: the data is not a JSON object, or is nested too deep.

    Example:
        Fields(b'{"step": 3}', "otter/step.json").take("step", integer(0, 10**9))
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
            raise self.refusal(f"it is {_shown(self.values)} instead of a JSON object")

    def take(self, name: str, check: Check[T], *default: T) -> T:
        """Return the value of a field.

        Args:
            name: the name of the field.
            check: checks the value, and returns it typed.
            default: the value of a field that is missing. Without a default, the field is required.

        Raises:
            CorruptObjectError: a required field is missing, or the value fails the check.
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
        """Return the error that refuses the record.

        Args:
            why: the reason, without a full stop.
        """
        where = f"{self._key!r} in {self._url}" if self._url else repr(self._key)
        return CorruptObjectError(f"{where} cannot be read: {why}.", key=self._key, url=self._url or None)


class Record:
    """The base of a dataclass that is a record in a store. Its fields are declared with `checked`.

    Example:
        @dataclass(frozen=True)
        class Step(Record):
            step: int = checked(integer(0, 10**9))
    """

    @classmethod
    def parse(cls, data: Any, key: str = "the record", url: str = "") -> Self:
        """Make the record of an object.

        Args:
            data: the object's bytes, or the decoded object.
            key: the key of the object, for messages.
            url: the url of its store, for messages.

        Raises:
            CorruptObjectError: the object is not such a record. The message names the field that is wrong.
        """
        fields = Fields(data, key, url)
        given = {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            is_needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if is_needed or field.name in fields.values:
                given[field.name] = fields.take(field.name, field.metadata["check"])
        return cls(**given)


def checked(check: Check[Any], *default: Any, unit: str = "") -> Any:
    """Declare a field of a `Record`.

    Args:
        check: checks a value of the field.
        default: the value of a field that is missing. Without a default, the field is required.
        unit: the unit of the value, for the reference. Default: the value has no unit.

    Example:
        step: int = checked(integer(0, 10**9), 0)
    """
    metadata = {"check": check, "unit": unit}
    if not default:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default_factory=lambda: default[0], metadata=metadata)


def nested(record: type[Record]) -> Check[Any]:
    """Return a check for a JSON object that is a record itself.

    Args:
        record: the type of the record.

    Example:
        checked(nullable(nested(Standstill)), None)
    """

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
    """Return a check for an integer. A bool is not an integer.

    Args:
        least: the smallest legal value.
        most: the largest legal value.

    Example:
        integer(0, 10)(3)
    """
    kind = f"an integer from {least} to {most}"
    return _expect(kind, lambda v: isinstance(v, int) and not isinstance(v, bool) and least <= v <= most)


def number(least: float = -1e300, most: float = 1e300) -> Check[float]:
    """Return a check for a finite number, which becomes a float.

    Args:
        least: the smallest legal value. Default: -1e300.
        most: the largest legal value. Default: 1e300.

    Example:
        number(0.0)(1.5)
    """
    fits = _expect(f"a number from {least:g} to {most:g}", lambda v: is_plain_number(v) and least <= v <= most)
    return lambda value: float(fits(value))


def text(max_characters: int = MAX_TEXT, pattern: re.Pattern[str] | None = None) -> Check[str]:
    """Return a check for a string. Lone surrogates, which cannot be printed, are replaced by `?`.

    Args:
        max_characters: the largest legal length. Default: 65,536.
        pattern: the whole string must match it. Default: any string.

    Example:
        text(100)("brave-otter-7f3a")
    """

    def check(value: Any) -> str:
        if not isinstance(value, str) or len(value) > max_characters:
            raise ValueError(f"a string of at most {max_characters} characters")
        if pattern is not None and not pattern.fullmatch(value):
            raise ValueError(f"a string like {pattern.pattern}")
        return value.encode(errors="replace").decode()

    return check


def parsed(parse: Callable[[str], Any]) -> Check[str]:
    """Return a check for a text that can be parsed. The value becomes the text of what was parsed.

    Args:
        parse: parses the text. Raises ValueError for another text.

    Example:
        checked(parsed(Restarts.parse))
    """

    def check(value: Any) -> str:
        return str(parse(text(400)(value)))

    return check


def one_of(*words: str) -> Check[str]:
    """Return a check for a string that is one of some words.

    Args:
        words: the legal words.

    Example:
        one_of("cancel", "stop", "resume")("stop")
    """
    return _expect(f"one of {', '.join(words)}", lambda value: isinstance(value, str) and value in words)


flag: Check[bool] = _expect("true or false", lambda value: isinstance(value, bool))
json_object: Check[dict[str, Any]] = _expect("a JSON object", lambda value: isinstance(value, dict))


def anything(value: Any) -> Any:
    """Accept any JSON value. This is a check, as `integer` returns one.

    Args:
        value: the value.

    Example:
        checked(anything, None)
    """
    return value


def list_of(each: Check[T]) -> Check[tuple[T, ...]]:
    """Return a check for a list, which becomes a tuple.

    Args:
        each: checks each value of the list.

    Example:
        list_of(integer(0, 10))([1, 2])
    """

    def check(value: Any) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise ValueError("a list")
        try:
            return tuple(each(item) for item in value)
        except ValueError as expected:
            raise ValueError(f"a list, each item {expected},") from None

    return check


def nullable(check: Check[T]) -> Check[T | None]:
    """Return a check for null, or a value that another check accepts.

    Args:
        check: checks a value that is not null.

    Example:
        nullable(integer(0, 10))(None)
    """

    def check_or_none(value: Any) -> T | None:
        try:
            return None if value is None else check(value)
        except ValueError as expected:
            raise ValueError(f"null or {expected}") from None

    return check_or_none


def is_plain_number(value: Any) -> bool:
    """Return True if a value is a number that can be shown and compared. NaN is such a number, and a bool is not.

    Args:
        value: any JSON value.

    Example:
        is_plain_number(0.5)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value != value or abs(value) < 1e300  # `math.isnan` would fail for an integer that is too large for a float


def is_json(value: Any) -> bool:
    """Return True if a value can be written as JSON.

    Args:
        value: any value.

    Example:
        is_json({"loss": 0.5})
    """
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def is_deeper_than(value: Any, depth: int) -> bool:
    """Return True if a JSON value is nested deeper than a limit. Recursive code might run out of stack on such a value.

    Args:
        value: the JSON value.
        depth: the limit. A list or object in a list or object adds one.

    Example:
        is_deeper_than([[[]]], 1)
    """
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
    """Return a value for a message, in at most `MAX_SHOWN` characters and without nested values."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    shown = value if isinstance(value, str) else json.dumps(value)
    shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}…"
    return repr(shown) if isinstance(value, str) else shown
