"""A replica's own arguments and folder for the Trainer of transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from executors.replica import Replica, set_current_replica

transformers = pytest.importorskip("transformers", reason="pip install 'serverless-replicas[hf-trainer]'")
from diloco.trainers.hf import OwnFolder, replica_arguments  # noqa: E402


@pytest.fixture(autouse=True)
def _no_replica_is_left() -> Iterator[None]:
    yield
    set_current_replica(None)


def test_each_replica_has_arguments_of_its_own_and_a_plain_script_keeps_its() -> None:
    args = transformers.TrainingArguments("out", seed=7, use_cpu=True)
    own = []
    for rank in (0, 1):
        set_current_replica(Replica(rank, 2, "run", 0, "memory://hf"))
        own.append(replica_arguments(args))
    assert [(each.output_dir, each.run_name, each.seed, each.data_seed) for each in own] == [
        ("out/0", "run-0", 7, 7),
        ("out/1", "run-1", 10014, 10014),
    ]
    assert (args.output_dir, args.seed, args.data_seed) == ("out", 7, None)
    set_current_replica(None)
    assert replica_arguments(args).output_dir == "out"


@pytest.mark.parametrize("asked", [None, "lab/model"])
def test_rank_0_alone_pushes_and_to_the_repository_that_was_asked_for(asked: str | None) -> None:
    args = transformers.TrainingArguments("somewhere/model", push_to_hub=True, hub_model_id=asked, use_cpu=True)
    own = []
    for rank in (0, 1):
        set_current_replica(Replica(rank, 2, "run", 0, "memory://hf"))
        own.append(replica_arguments(args))
    assert [each.push_to_hub for each in own] == [True, False]
    assert {each.hub_model_id for each in own} == {asked or "model"}


@dataclasses.dataclass
class Config(transformers.TrainingArguments):  # type: ignore[misc, name-defined]
    """Arguments like those of TRL: a subclass with more fields."""

    max_length: int = 1024


def test_the_arguments_of_a_subclass_keep_their_class_and_fields() -> None:
    set_current_replica(Replica(1, 2, "run", 0, "memory://hf"))
    own = replica_arguments(Config("out", max_length=8, use_cpu=True))
    assert (type(own), own.max_length, own.output_dir) == (Config, 8, "out/1")


def test_an_object_that_is_not_training_arguments_is_refused_with_its_type() -> None:
    with pytest.raises(TypeError, match=r"or a subclass such as TRL's SFTConfig, got a dict\."):
        replica_arguments({"output_dir": "out"})


def test_a_script_that_asks_its_own_arguments_at_the_end_pushes_from_rank_0_alone() -> None:
    """The script calls `Trainer(model, replica_arguments(args))`, and ends with `if args.push_to_hub:
    trainer.push_to_hub()`.
    """
    asked = []
    for rank in (0, 1, 2):
        args = transformers.TrainingArguments("somewhere/model", push_to_hub=True, use_cpu=True)
        set_current_replica(Replica(rank, 3, "run", 0, "memory://hf"))
        replica_arguments(args)
        asked.append(args.push_to_hub)
    assert asked == [True, False, False]


def test_two_replicas_in_one_folder_are_both_refused_and_advised_to_use_their_own(tmp_path: Path) -> None:
    first, second = (OwnFolder(tmp_path, Replica(rank, 2, "run", 0, "memory://hf")) for rank in (0, 1))
    first.check()
    for each in (second, first):
        with pytest.raises(ValueError, match=r"Rank [01] writes to output_dir=.*replica_arguments\(args\)"):
            each.check()
    OwnFolder(tmp_path, Replica(0, 2, "another run", 0, "memory://hf")).check()
    OwnFolder(tmp_path / "1", Replica(1, 2, "run", 0, "memory://hf")).check()
    for each in (second, first):
        each.leave()
    assert [path.name for path in (tmp_path / ".replicas").iterdir()] == ["another run"]


def test_a_replica_that_was_added_to_a_run_of_one_is_refused_the_first_ones_folder(tmp_path: Path) -> None:
    first, added = (OwnFolder(tmp_path, Replica(rank, 1, "run", 0, "memory://hf")) for rank in (0, 1))
    first.check()
    with pytest.raises(ValueError, match=r"Rank 0 writes to output_dir="):
        added.check()


def test_a_plain_script_leaves_nothing_in_its_folder_but_the_trainers(tmp_path: Path) -> None:
    OwnFolder(tmp_path, Replica(0, 1, "alone", 0, "memory://hf", is_alone=True)).check()
    assert list(tmp_path.iterdir()) == []
