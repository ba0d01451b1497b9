"""Tests the part of an outcome that describes an exception of the user's code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from executors.attempt import Attempt
from executors.errors import HangError, StoreError
from executors.process import signal_name
from executors.protocol import Outcome, ReplicaStatus
from executors.store.memory import MemoryStore
from executors.view.report.root_cause import headline, last_frames
from executors.worker.failure import describe_failure, fingerprint_of

SOURCE = """
import json

def train(text):
    return inner(text)

def inner(text):
    return json.loads(text)
"""


def failure_of(file: str) -> dict[str, str | None]:
    """Return the failure of code in a file. The code calls a library, which raises the error."""
    names: dict[str, object] = {}
    exec(compile(SOURCE, file, "exec"), names)
    try:
        names["train"]("not JSON")  # type: ignore[operator]
    except ValueError as error:
        return describe_failure(error)
    raise AssertionError("it did not fail")


@pytest.mark.parametrize(
    ("file", "place"),
    [
        ("{here}/train.py", "train.py:8"),
        ("{here}/models/net.py", "models/net.py:8"),
        ("/somewhere/else/net.py", "net.py:8"),
        ("/tmp/ipykernel_123/456.py", "a notebook's cell, line 8"),
        ("<ipython-input-3-0123456789ab>", "a notebook's cell, line 8"),
        ("/usr/lib/python3/site-packages/torch/nn/modules.py", "test_failure.py:35"),
    ],
)
def test_the_place_is_the_last_of_the_users_own_lines(
    file: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    failure = failure_of(file.format(here=tmp_path))
    assert failure["error_place"] == place
    assert str(failure["error_line"]).startswith("json.decoder.JSONDecodeError: Expecting value")
    assert "json/decoder.py" in str(failure["error"]), "the whole way is in the traceback"


def test_the_place_of_an_error_in_generated_code_is_the_line_of_the_file_that_called_it() -> None:
    names: dict[str, Callable[[], None]] = {}
    exec("import json\ndef made(): json.loads('none')", names)
    with pytest.raises(ValueError, match="Expecting value") as raised:
        names["made"]()
    assert str(describe_failure(raised.value)["error_place"]).startswith("tests/unit/executors/test_failure.py:")


def test_an_exception_without_a_traceback_has_no_place() -> None:
    failure = describe_failure(KeyboardInterrupt())
    assert (failure["error"], failure["error_line"], failure["error_place"]) == ("KeyboardInterrupt",) * 2 + (None,)


def test_a_hang_is_reported_by_its_sentence_alone() -> None:
    failure = describe_failure(HangError("Replica 3 of 8 made no progress for 61 s (limit 60 s)"))
    assert failure["error_line"] == "Replica 3 of 8 made no progress for 61 s (limit 60 s)"


def raised_at_a_place_of_its_own(error: Exception) -> Exception:
    with pytest.raises(type(error)) as raised:
        raise error
    return raised.value


@pytest.mark.parametrize(
    ("other", "is_alike"),
    [
        (ValueError("step 813: loss at 0x7f22 is nan"), True),
        (ValueError("step 812: loss at 0x7f01 is inf"), False),
        (TypeError("step 812: loss at 0x7f01 is nan"), False),
    ],
)
def test_errors_of_one_kind_at_one_place_have_one_fingerprint_whatever_their_numbers(
    other: Exception, is_alike: bool
) -> None:
    first = raised_at_a_place_of_its_own(ValueError("step 812: loss at 0x7f01 is nan"))
    assert (fingerprint_of(first) == fingerprint_of(raised_at_a_place_of_its_own(other))) is is_alike
    assert fingerprint_of(first) != fingerprint_of(ValueError(str(first))), (
        "an error at another place has another fingerprint"
    )


def raised_in_tasks(*errors: Exception) -> BaseException:
    async def fail(error: Exception) -> None:
        raise error

    async def fail_together() -> None:
        async with asyncio.TaskGroup() as tasks:
            for error in errors:
                tasks.create_task(fail(error))

    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(fail_together())
    return raised.value


def test_errors_in_a_task_group_are_alike_only_if_their_sub_exceptions_are() -> None:
    first = fingerprint_of(raised_in_tasks(ValueError("rank 1"), TypeError("two")))
    assert fingerprint_of(raised_in_tasks(ValueError("rank 2"), TypeError("two"))) == first
    assert fingerprint_of(raised_in_tasks(TypeError("two"), ValueError("rank 1"))) == first, (
        "the order of errors in a group does not change the fingerprint"
    )
    assert fingerprint_of(raised_in_tasks(ValueError("rank 1"), TypeError("three"))) != first
    alone = fingerprint_of(raised_in_tasks(ValueError("rank 1")))
    assert alone not in (None, first)
    assert fingerprint_of(raised_in_tasks(ValueError("rank 1"), ValueError("rank 2"))) == alone, (
        "the number of failed tasks does not change the fingerprint"
    )


def test_different_causes_are_different_failures() -> None:
    def load(cause: Exception) -> None:
        raise RuntimeError("cannot load the data") from ran_into(fail, cause)

    def fail(cause: Exception) -> None:
        raise cause

    def caused_by(cause: Exception) -> str | None:
        return fingerprint_of(ran_into(load, cause))

    assert caused_by(TimeoutError("after 3 s")) == caused_by(TimeoutError("after 4 s"))
    assert caused_by(TimeoutError("after 3 s")) != caused_by(ConnectionError("reset"))


def test_the_summary_of_an_exception_group_names_its_first_leaf_and_frame() -> None:
    def fail_deeply(error: Exception) -> None:
        raise error

    def fail_in_groups() -> None:
        inner = ExceptionGroup("inner", [ran_into(fail_deeply, ConnectionError("reset")), ran_into(fail, OSError("b"))])
        raise ExceptionGroup("outer", [inner, ran_into(fail, KeyError("c"))])

    def fail(error: Exception) -> None:
        raise error

    failure = describe_failure(ran_into(fail_in_groups))
    outcome = Outcome(0, 0, ReplicaStatus.FAILED, "exception", **failure)  # type: ignore[arg-type]
    line = fail_deeply.__code__.co_firstlineno + 1
    lines = "ExceptionGroup: outer (2 sub-exceptions): ConnectionError: reset"
    assert headline(outcome, [0], 1).startswith(lines)
    assert headline(outcome, [0], 1).endswith(f"test_failure.py:{line})")
    frames = last_frames(outcome)
    assert frames[-2:] == [f'  File "{__file__}", line {line}, in fail_deeply', "    raise error"]
    assert not any("in fail\n" in f"{frame}\n" for frame in frames), (
        "frames of other leaves are left out, because they look like callers"
    )


def ran_into(function: Callable[..., None], *arguments: object) -> Exception:
    """Return the exception that a function raises."""
    with pytest.raises(Exception) as raised:
        function(*arguments)
    return raised.value


def test_a_store_that_fails_in_a_task_is_not_a_likeness() -> None:
    assert fingerprint_of(raised_in_tasks(ValueError("one"), StoreError("gone", key="a"))) is None


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (40, "SIG40")])
def test_a_signal_is_named_even_if_the_system_gives_it_no_name(number: int, name: str) -> None:
    assert signal_name(number) == name


def test_a_place_of_any_length_is_recorded_as_far_as_readers_take_it() -> None:
    attempt = Attempt(MemoryStore(), "otter", 0)
    attempt.record(Outcome(0, 0, ReplicaStatus.FAILED, "exception", error_place="x" * 5000 + "/train.py:12"))
    found = attempt.outcome()
    assert found is not None
    assert str(found.error_place).endswith("xx/train.py:12")


@pytest.mark.parametrize(("exit_code", "recorded"), [("137", None), (True, 1), (10**20, None), (-9, -9)])
def test_an_exit_code_that_an_executor_reports_can_be_read_whatever_it_is(
    exit_code: object, recorded: int | None
) -> None:
    row = {"status": "failed", "reason": "no_result", "exit_code": exit_code}
    outcome = Attempt(MemoryStore(), "otter", 0).record(Outcome.of_row(0, 0, row))
    assert (outcome.status, outcome.exit_code) == ("failed", recorded)
    assert outcome.exit_code is not True
