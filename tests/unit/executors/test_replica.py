"""Tests the `Replica` of a process, also of a process that `replicas` did not start."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from executors import ReplicasError, current_replica
from executors import replica as environment
from executors.replica import CONTRACT, Replica, find_replica, set_current_replica


@pytest.fixture(autouse=True)
def _no_replica_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in CONTRACT:
        monkeypatch.delenv(name, raising=False)
    set_current_replica(None)
    environment._replica_alone.cache_clear()
    yield
    set_current_replica(None)


def test_a_process_that_no_one_launched_is_rank_0_of_1_and_one_line_reports_that(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    me = current_replica()
    assert (me.rank, me.world_size, me.attempt, me.is_alone) == (0, 1, 0, True)
    assert current_replica() is me
    me.report(step=3, loss=0.5)
    (tmp_path / "weights").write_text("kept where it is")
    me.save_artifact("weights", tmp_path / "weights")
    assert list(me.store.list("")) == []
    with pytest.raises(FileNotFoundError):
        me.save_artifact("weights", tmp_path / "no such file")
    with pytest.raises(ValueError, match="characters that cannot be shown"):
        me.save_artifact("a\nb", tmp_path / "weights")
    (line,) = capsys.readouterr().err.splitlines()
    assert "not a replica, so it is alone: world size 1, in memory, and nothing is kept. With others: " in line
    assert find_replica() is None, "code that wants to know can tell the difference"


def test_the_advice_in_a_notebook_names_no_file_of_the_kernel(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["/lib/site-packages/ipykernel_launcher.py", "-f", "kernel.json"])
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    current_replica()
    assert capsys.readouterr().err.endswith('With others: executors.launch("local", your_function, n=4)\n')


def test_an_integer_beyond_all_floats_is_reported_as_infinite() -> None:
    me = current_replica()
    me.report(step=10**5000, loss=-(10**5000), tokens=2**60)
    assert me.reported == {"step": math.inf, "loss": -math.inf, "tokens": 2**60}, (
        "the numbers are finite or infinite floats, as a heartbeat can hold them"
    )


def test_a_path_that_is_not_a_file_is_refused_as_an_artifact_and_skipped_with_a_note_in_a_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kept, folder = tmp_path / "kept", tmp_path / "folder"
    set_current_replica(Replica(0, 1, "otter", 0, kept.as_uri()))
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "latest").symlink_to(tmp_path, target_is_directory=True)
    (folder / "weights").write_text("1")
    for path in (folder / "pipe", Path("/dev/null")):
        with pytest.raises(ValueError, match=rf"save_artifact\('x', …\): '{path}' is neither a file nor a folder"):
            current_replica().save_artifact("x", path)
    current_replica().save_artifact("x", folder)
    assert [entry.key for entry in current_replica().store.list("")] == ["otter/replicas/0000/0/artifacts/x/weights"]
    said = capsys.readouterr().err.splitlines()
    assert said == [f"replicas: save_artifact('x') skips {name!r}: not a file." for name in ("latest", "pipe")]


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (("REPLICA_RANK",), "only some variables of a replica: REPLICA_RANK is not set."),
        (
            ("REPLICA_RANK", "REPLICA_RUN_ID"),
            "only some variables of a replica: REPLICA_RANK, REPLICA_RUN_ID are not set.",
        ),
    ],
)
def test_part_of_a_replicas_environment_is_refused(
    missing: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CONTRACT:
        if name not in missing:
            monkeypatch.setenv(name, "0")
    with pytest.raises(ReplicasError) as caught:
        current_replica()
    assert message in str(caught.value)
