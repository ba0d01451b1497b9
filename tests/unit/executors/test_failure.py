"""What an exception of the user's code leaves in its outcome."""

from __future__ import annotations

from pathlib import Path

import pytest

from executors.attempt import Attempt
from executors.protocol import Outcome, ReplicaStatus
from executors.store.memory import MemoryStore
from executors.worker.failure import describe_failure

SOURCE = """
import json

def train(text):
    return inner(text)

def inner(text):
    return json.loads(text)
"""


def failure_of(file: str) -> dict[str, str | None]:
    """Fail in code of a file, within a library that it calls."""
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
        ("/usr/lib/python3/site-packages/torch/nn/modules.py", "test_failure.py:30"),
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


def test_an_exception_of_nobody_has_no_place() -> None:
    assert describe_failure(KeyboardInterrupt()) == {
        "error": "KeyboardInterrupt", "error_line": "KeyboardInterrupt", "error_place": None,
    }  # fmt: skip


def test_a_place_of_any_length_is_recorded_as_far_as_readers_take_it() -> None:
    attempt = Attempt(MemoryStore(), "otter", 0)
    attempt.record(Outcome(0, 0, ReplicaStatus.FAILED, "exception", error_place="x" * 5000 + "/train.py:12"))
    found = attempt.outcome()
    assert found is not None
    assert str(found.error_place).endswith("xx/train.py:12")
