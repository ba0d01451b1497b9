"""Tests exports of measurements, as tables and as TensorBoard's event files, with the programs that read them."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.made_up_runs import BEGAN_AT, calm, hostile, with_kills, without_diloco

from executors.errors import MissingDependencyError, ReplicasError
from executors.metrics.metrics import Metrics
from executors.metrics.rows import Numbers
from executors.view.report.tables import write_csv, write_jsonl
from executors.view.report.tensorboard import open_event_files

FORMULAS = ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "＝1", '"=1', "a;=1", "a,=1", "'=1")


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install tensorboard")
    return tmp_path / "events"


def write(folder: Path, metrics: Metrics, *, is_over: bool = True, launched_at: float = BEGAN_AT) -> int:
    with open_event_files(folder, metrics.run_id, launched_at) as files:
        return files.write(metrics, is_over=is_over)


def points(folder: Path) -> dict[str, dict[str, list[tuple[float, int, float]]]]:
    """Return the points that TensorBoard reads, by folder and name: wall time, step, value."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    found: dict[str, dict[str, list[tuple[float, int, float]]]] = {}
    for path in folder.iterdir():
        if path.is_dir():
            read = EventAccumulator(str(path), size_guidance={SCALARS: 0}, purge_orphaned_data=False).Reload()
            found[path.name] = {
                tag: [(each.wall_time, each.step, each.value) for each in read.Scalars(tag)]
                for tag in read.Tags()["scalars"]
            }
    return found


def until(metrics: Metrics, second: float) -> Metrics:
    """Return the rows that were known at a given second of a run that continues."""
    rows = [row for row in metrics.rows if metrics.at(row) <= second]
    spans = [replace(span, outcome=None, ended_s=None) for span in metrics.attempts if span.started_s <= second]
    return replace(metrics, rows=rows, attempts=spans)


def test_tensorboard_has_a_folder_for_each_rank_and_the_anchor(exported: Path) -> None:
    metrics = with_kills().metrics
    n_written = write(exported, metrics)
    found = points(exported)
    assert sorted(found) == ["anchor", "rank-0", "rank-1", "rank-2", "rank-3"]
    assert n_written == len(metrics) + len(found["anchor"]["loss"])
    for rank in range(4):
        reported = [row for row in metrics.numbers if row.rank == rank]
        losses = found[f"rank-{rank}"]["loss"]
        assert [step for _, step, _ in losses] == [row.values["step"] for row in reported]
        assert [value for _, _, value in losses] == pytest.approx([row.values["loss"] for row in reported])
        assert [at for at, _, _ in losses] == pytest.approx([BEGAN_AT + metrics.at(row) for row in reported])
        waited = {row.entry: pytest.approx(row.wait_s) for row in metrics.rounds if row.rank == rank}
        assert {step: value for _, step, value in found[f"rank-{rank}"]["round/wait_s"]} == waited
    assert {"step", "total_steps"}.isdisjoint(name for names in found.values() for name in names)


def test_rows_without_a_step_have_points_of_their_own(exported: Path) -> None:
    metrics = without_diloco().metrics
    write(exported, metrics)
    steps = [step for _, step, _ in points(exported)["rank-0"]["accuracy"]]
    assert len({*steps}) == len([row for row in metrics.numbers if row.rank == 0])
    twice = Numbers(rank=0, attempt=0, t=500.0, values={"accuracy": 0.5})
    assert write(exported, replace(metrics, rows=[*metrics.rows, twice, twice])) == 2


def test_no_event_is_written_twice_and_none_is_missing_however_often_an_export_is_started(exported: Path) -> None:
    metrics = with_kills().metrics
    whole = exported.parent / "whole"
    write(whole, metrics)
    with open_event_files(exported, metrics.run_id, BEGAN_AT) as files:
        for second in (10.0, 10.0, 33.0):
            files.write(until(metrics, second), is_over=False)
    (file,) = (exported / "rank-1").glob("events*")
    file.write_bytes(file.read_bytes()[:-7])  # as if the export was killed while it wrote
    assert write(exported, until(metrics, 60.0), is_over=False) > 0
    write(exported, metrics)
    assert write(exported, metrics) == 0
    assert {name: {tag: sorted(of[tag]) for tag in of} for name, of in points(exported).items()} == {
        name: {tag: sorted(of[tag]) for tag in of} for name, of in points(whole).items()
    }


def test_a_folder_of_events_belongs_to_one_run_and_one_export(exported: Path) -> None:
    metrics = calm().metrics
    with (
        open_event_files(exported, metrics.run_id, BEGAN_AT),
        pytest.raises(ReplicasError, match="Another process exports to"),
    ):
        write(exported, metrics)
    with pytest.raises(ReplicasError, match="holds the events of run 'calm-otter-7f3a, "):
        write(exported, with_kills().metrics)


def test_a_folder_of_events_of_an_earlier_run_of_that_id_is_refused(exported: Path) -> None:
    metrics = calm().metrics
    write(exported, metrics)
    said = "run 'calm-otter-7f3a, launched 2026-09-21 14:13:20 UTC'. Choose another folder for 'calm-otter-7f3a, "
    with pytest.raises(ReplicasError, match=said):
        write(exported, metrics, launched_at=BEGAN_AT + 60)


def test_without_tensorboard_the_error_explains_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensorboard", "tensorboard.summary", "tensorboard.summary.writer"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'tensorboard>="):
        write(tmp_path / "events", calm().metrics)
    assert not (tmp_path / "events").exists()


def test_a_table_has_a_line_for_each_row(tmp_path: Path) -> None:
    metrics = with_kills().metrics
    write_csv(metrics, tmp_path / "run.csv")
    write_jsonl(metrics, tmp_path / "run.jsonl")
    with (tmp_path / "run.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    objects = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert len(lines) == len(objects) == len(metrics)
    for line, found, row in zip(lines, objects, metrics, strict=True):
        assert found["kind"] == line["kind"] == ("numbers" if isinstance(row, Numbers) else "round")
        assert float(line["s"]) == found["s"] == metrics.at(row)
        if isinstance(row, Numbers):
            assert float(line["loss"]) == found["loss"] == row.values["loss"]
        else:
            assert (line["loss"], line["ranks"].split()) == ("", [str(rank) for rank in found["ranks"]])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.csv", "run.jsonl"]


def test_no_name_of_a_number_is_a_formula_in_a_spreadsheet(tmp_path: Path) -> None:
    metrics = calm().metrics
    rows = [Numbers(rank=0, attempt=0, t=1.0, values={**dict.fromkeys(FORMULAS, -1.5), "kind": 3.0})]
    write_csv(replace(metrics, rows=rows), tmp_path / "run.csv")
    text = (tmp_path / "run.csv").read_text()
    for separator in ",;\t":
        cells = [cell for line in csv.reader(text.splitlines(), delimiter=separator) for cell in line]
        assert [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "＝", "\t")) and cell != "-1.5"] == []
    assert text.splitlines()[1].startswith("numbers,0,0,")


def test_hostile_names_are_inert_in_every_file(tmp_path: Path, exported: Path) -> None:
    metrics = hostile().metrics
    write_csv(metrics, tmp_path / "run.csv")
    write_jsonl(metrics, tmp_path / "run.jsonl")
    write(exported, metrics)
    texts: list[Any] = [(tmp_path / name).read_text() for name in ("run.csv", "run.jsonl")]
    texts += points(exported)["rank-0"]
    assert [text for text in texts if "\x1b" in text or "\u202e" in text] == []


def test_a_device_is_not_replaced_by_a_table(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Not a regular file"):
        write_csv(calm().metrics, Path("/dev/null"))
    with pytest.raises(IsADirectoryError):
        write_jsonl(calm().metrics, tmp_path)
