"""The demo's task runs everywhere, and its messages name the cause of a failure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco import demo
from diloco.demo import load_text
from executors.replica import Replica, set_current_replica

PROSE = "the quick brown fox jumps over the lazy dog, and then again. "


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Replica]:
    replica = Replica(rank=0, world_size=1, run_id="demo", attempt=0, rendezvous=(tmp_path / "store").as_uri())
    replica.claimed_nonce = "nonce"
    set_current_replica(replica)
    yield replica
    set_current_replica(None)


def test_a_short_demo_alone_prints_its_results(
    alone: Replica, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(PROSE * 200)

    result: dict[str, Any] = demo.train(steps=25, inner_steps=10, data=str(text), compare=True, batch=2)

    assert result["rounds"] == 3  # two planned rounds, and one for the steps after them
    assert result["loss"] < result["loss_before"]
    for words in (
        "1 replica trained",
        "3 rounds moved",
        "Held-out loss",
        "one replica alone",
        "data-parallel",
        "It writes:",
        "MB up",
    ):
        assert words in result["summary"]
    assert alone.reported["step"] == 25
    assert alone.reported["round"] == 3
    assert "round_s" in alone.reported
    assert "step     0 of 25  loss" in capsys.readouterr().out


def test_a_demo_that_cannot_train_raises_a_clear_error(alone: Replica, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(FileNotFoundError, match="data='/nowhere' names no file or folder"):
        demo.train(data="/nowhere")
    with pytest.raises(ValueError, match="has 5 bytes of text, and the demo needs at least 1024"):
        demo.train(data=str(tmp_path / "short.txt"))
    with pytest.raises(ValueError, match="steps must be an integer of at least 1, got steps=0"):
        demo.train(steps=0)


def test_a_folder_is_read_and_every_replica_has_a_share_of_its_own(tmp_path: Path) -> None:
    for index in range(3):
        (tmp_path / f"{index}.txt").write_text(PROSE * 300)
    text = load_text(str(tmp_path))
    shares = [text.share(rank, 3) for rank in range(3)]
    total = sum(len(chunk) for chunk in text.training)
    assert sum(map(len, shares)) == total
    assert len(text.held_out) > 65
    many = [load_text(str(tmp_path / "0.txt")).share(rank, 1000) for rank in range(1000)]
    assert min(map(len, many)) > 65


def test_the_default_text_is_the_standard_library() -> None:
    text = load_text()
    assert sum(len(chunk) for chunk in text.training) > 5_000_000
    assert b"import " in bytes(text.share(1, 4)[:50_000].tolist())
