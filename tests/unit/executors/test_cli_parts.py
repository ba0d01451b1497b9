"""The parts of the command that need no run: exit codes, options of backends, words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest

from executors import LocalProcessExecutor, ReplicaStatus
from executors.cli.backends import describe_options
from executors.cli.options import check_options, parse_duration
from executors.cli.output import (
    UsageProblem,
    name_age,
    name_duration,
    name_limit,
    name_ranks,
    one_line,
    strict_json,
)
from executors.cli.summary import exit_code, find_summary
from executors.protocol import Outcome, Reason
from executors.registry import OptionText, read_options


def outcome(rank: int, reason: Reason | None = None) -> Outcome:
    status = {None: ReplicaStatus.SUCCEEDED, "cancelled": ReplicaStatus.CANCELLED}.get(reason, ReplicaStatus.FAILED)
    return Outcome(rank, 0, status, reason)


def test_the_exit_code_is_the_first_that_applies() -> None:
    cases: list[tuple[list[Reason | None], bool, int]] = [
        ([None, None], False, 0),
        ([None, "exception"], False, 1),
        ([None, "timeout"], False, 124),
        (["signal", "timeout"], False, 1),
        (["lost", None], False, 1),
        (["cancelled", None], False, 130),
        (["cancelled", "exception", "timeout"], False, 130),
        (["exception"], True, 130),
        ([None], True, 130),
        ([None, "fenced"], False, 0),
    ]
    for reasons, interrupted, code in cases:
        outcomes = [outcome(rank, reason) for rank, reason in enumerate(reasons)]
        assert exit_code(outcomes, interrupted=interrupted) == code, reasons


def test_a_process_that_was_ended_because_a_peer_failed_is_not_cancelled_by_the_user() -> None:
    error = "Replica 0 was ended: rank 1 failed before the first round: ValueError: no."
    ended = replace(outcome(0, "cancelled"), error=error)
    assert exit_code([ended, outcome(1, "exception")]) == 1
    assert exit_code([ended, outcome(1, "exception"), outcome(2, "cancelled")]) == 130


def test_the_summary_is_that_of_the_lowest_rank_that_succeeded_and_has_one() -> None:
    rows: list[tuple[ReplicaStatus, Any]] = [
        (ReplicaStatus.FAILED, {"summary": "of a failed rank"}),
        (ReplicaStatus.SUCCEEDED, {"loss": 1}),
        (ReplicaStatus.SUCCEEDED, {"summary": 3}),
        (ReplicaStatus.SUCCEEDED, {"summary": "this"}),
        (ReplicaStatus.SUCCEEDED, {"summary": "another"}),
    ]
    assert find_summary([Outcome(rank, 0, s, result=r) for rank, (s, r) in enumerate(rows)]) == "this"


class Typed:
    """A class of an executor that has only options.

    Args:
        names: some names,
            over two lines.
        speed: how fast.
    """

    def __init__(  # type: ignore[no-untyped-def]
        self,
        names: Sequence[str],
        *,
        speed: float = 1,
        count: int | None = None,
        mode: Literal["a", "b"] = "a",
        labels: Mapping[str, str] | None = None,
        on: bool = False,
        anything: Any = None,
        text: str | None = None,
        untyped=None,
    ) -> None: ...


class Unresolved:
    """A third party's class whose annotation cannot be resolved here."""

    def __init__(self, gpu: Missing = 3) -> None: ...  # type: ignore[name-defined] # noqa: F821


def test_the_value_of_an_option_has_the_type_its_constructor_declares() -> None:
    for option, good, bad in (
        ("names", ["a"], "a"),
        ("names", [], [1]),
        ("speed", 2, "2"),
        ("speed", 0.5, True),
        ("count", None, 1.5),
        ("count", 3, "3"),
        ("mode", "b", "c"),
        ("labels", {"a": "b"}, ["a"]),
        ("on", True, 1),
    ):
        check_options("typed", Typed, {option: good, "anything": object(), "untyped": 3})
        with pytest.raises(UsageProblem, match=f"Option '{option}' of backend 'typed' takes"):
            check_options("typed", Typed, {option: bad})
    check_options("unresolved", Unresolved, {"gpu": "any"})


def test_the_text_of_an_option_is_read_as_its_constructor_wants_it() -> None:
    for option, text, expected in (
        ("count", "3", 3),
        ("count", "null", None),
        ("speed", "3.14", 3.14),
        ("names", '["a"]', ["a"]),
        ("on", "true", True),
        ("text", "3.14", "3.14"),
        ("text", "007", "007"),
        ("text", "1e3", "1e3"),
        ("text", "true", "true"),
        ("text", "null", None),
        ("text", '"quoted"', "quoted"),
        ("text", "a text", "a text"),
        ("untyped", "3", 3),
        ("of another class", "3", 3),
    ):
        read = read_options(Typed, {option: OptionText(text)})[option]
        assert (type(read), read) == (type(expected), expected), (option, text)
    check_options("typed", Typed, {"text": OptionText("3.14")})
    with pytest.raises(UsageProblem, match=r"Option 'text' of backend 'typed' takes str \| None, got \['a'\]"):
        check_options("typed", Typed, {"text": OptionText('["a"]')})
    with pytest.raises(UsageProblem, match=r"got 3\.1\. Write it in quotes\."):
        check_options("typed", Typed, {"text": 3.10})


def test_an_option_is_described_by_its_signature_and_its_docstring() -> None:
    options = {option["name"]: option for option in describe_options(Typed)}
    assert options["names"]["help"] == "some names, over two lines."
    assert (options["names"]["required"], options["speed"]["default"]) == (True, 1)
    types = {name: option["type"] for name, option in options.items()}
    assert (types["names"], types["mode"], types["untyped"]) == ("Sequence[str]", "Literal['a', 'b']", "")
    assert types["labels"] == "Mapping[str, str] | None"
    assert describe_options(LocalProcessExecutor)[0]["name"] == "preload"
    assert describe_options(Unresolved)[0]["type"] == "Missing"


def test_a_duration_is_seconds_or_hours_minutes_and_seconds() -> None:
    seconds = {
        "90": 90,
        "0": 0,
        "0.5": 0.5,
        "90s": 90,
        "5m": 300,
        "2h": 7200,
        "1h30m": 5400,
        "1h30": 3630,
        "1.5h": 5400,
    }
    assert {text: parse_duration(text) for text in seconds} == seconds
    for text in ("", "-1", "5x", "m", "30m1h", "inf", "nan", "1e3", "5 min"):
        with pytest.raises(UsageProblem, match=r"is not a duration. Give seconds, or .*: 90, 90s, 5m, 2h, 1h30m\."):
            parse_duration(text)


def test_ranks_and_times_are_named_for_people() -> None:
    assert [name_ranks(ranks) for ranks in ([3], [0, 1], [0, 1, 2, 5, 7, 8])] == [
        "rank 3",
        "ranks 0-1",
        "ranks 0-2, 5, 7-8",
    ]
    assert [name_duration(s) for s in (-1, 0.84, 42.9, 185, 7800)] == ["0.0 s", "0.8 s", "42 s", "3:05", "2:10:00"]
    assert [name_age(s) for s in (0.4, 61, 7300, 200_000)] == ["0 s", "1 min", "2 h", "2 d"]
    assert [name_limit(s) for s in (None, 0.5, 90.0)] == ["no time limit", "time limit 0.5 s", "time limit 1:30"]


def test_the_text_of_a_replica_moves_no_cursor_and_stays_on_its_line() -> None:
    assert one_line("\x1b[2J\x1b[31mred\x1b[0m\r\n\x07bell") == "red   bell"
    assert one_line("x" * 400, 10) == "xxxxxxxxx…"


def test_json_is_strict() -> None:
    assert json.loads(strict_json({"a": [float("nan"), (float("inf"), 1.5)]})) == {"a": [None, [None, 1.5]]}
