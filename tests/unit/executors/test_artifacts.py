"""Artifacts of a replica are written to the user's folder completely or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from executors.errors import StoreError
from executors.store import MemoryStore, artifacts
from executors.store.artifacts import Artifact, kept_artifacts
from executors.store.faulty import FaultyStore

SAVES: dict[str, Callable[[Artifact, Path], object]] = {
    "save": lambda artifact, folder: artifact.save(folder / artifact.name),
    "save_below": Artifact.save_below,
}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    """A store with one file, which is read in three parts."""
    monkeypatch.setattr("executors.store.artifacts.PART_BYTES", 4)
    made = FaultyStore(MemoryStore(), seed=0)
    made.put("kept/0/artifacts/model.pt", b"0123456789")
    return made


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_a_file_takes_the_place_of_an_older_one(
    store: FaultyStore, tmp_path: Path, save: Callable[[Artifact, Path], object]
) -> None:
    (artifact,) = kept_artifacts(store, 0, "kept/")
    for _ in range(2):
        save(artifact, tmp_path)
        assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("model.pt", b"0123456789")]


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
@pytest.mark.parametrize("older", [[], [("model.pt", b"an older one")]], ids=["none", "an older one"])
def test_a_file_that_cannot_be_read_to_its_end_leaves_no_part_and_an_older_one_whole(
    store: FaultyStore, tmp_path: Path, save: Callable[[Artifact, Path], object], older: list[tuple[str, bytes]]
) -> None:
    for name, data in older:
        (tmp_path / name).write_bytes(data)
    (artifact,) = kept_artifacts(store, 0, "kept/")
    store.fail_at("get", key="kept/*", count=2, action="error")
    with pytest.raises(StoreError):
        save(artifact, tmp_path)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == older


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
@pytest.mark.parametrize("listed", [b"", b"0123", b"0123456789"], ids=["empty", "in one part", "in parts"])
@pytest.mark.parametrize("newer", [b"abc", b"abcdefghijklm"], ids=["shorter", "longer"])
def test_an_artifact_that_was_saved_again_since_it_was_listed_is_written_whole(
    store: FaultyStore, tmp_path: Path, save: Callable[[Artifact, Path], object], listed: bytes, newer: bytes
) -> None:
    store.put("kept/0/artifacts/model.pt", listed)
    store.put("kept/0/artifacts/model.pt.json", b"another")
    artifact, _ = kept_artifacts(store, 0, "kept/")
    store.put("kept/0/artifacts/model.pt", newer)
    save(artifact, tmp_path)
    assert (tmp_path / "model.pt").read_bytes() == newer
    assert max(map(len, artifact.parts())) <= artifacts.PART_BYTES, (
        "parts are small, although the list has the old size"
    )


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
@pytest.mark.parametrize("newer", [b"abcdefghij", b"abcdefghijklm"], ids=["as large", "larger"])
def test_an_artifact_that_is_saved_again_while_it_is_read_in_parts_is_refused(
    store: FaultyStore, tmp_path: Path, save: Callable[[Artifact, Path], object], newer: bytes
) -> None:
    (artifact,) = kept_artifacts(store, 0, "kept/")
    store.fail_at("get", key="kept/*", count=2, after=lambda: store.put("kept/0/artifacts/model.pt", newer))
    with pytest.raises(StoreError, match="was replaced while it was read"):
        save(artifact, tmp_path)
    assert [*tmp_path.iterdir()] == []
    save(artifact, tmp_path)
    assert (tmp_path / "model.pt").read_bytes() == newer


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_a_file_is_written_neither_through_a_link_nor_over_a_folder_or_device(
    store: FaultyStore, tmp_path: Path, save: Callable[[Artifact, Path], object]
) -> None:
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / "model.pt").symlink_to("elsewhere")
    (artifact,) = kept_artifacts(store, 0, "kept/")
    save(artifact, tmp_path)
    assert (tmp_path / "elsewhere").read_text() == "mine"
    assert (tmp_path / "model.pt").read_bytes() == b"0123456789"
    (tmp_path / "model.pt").unlink()
    (tmp_path / "model.pt").symlink_to("/dev/null")
    with pytest.raises(OSError, match="regular file"):
        save(artifact, tmp_path)
