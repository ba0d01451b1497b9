"""Trackers that get the numbers of replicas: first a class of the tests that checks the contract, then the real
trackers.
"""

from __future__ import annotations

import importlib.util
import json
import sqlite3
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from executors import LocalProcessExecutor, Run, launch
from executors.errors import MissingDependencyError
from executors.run.resume import resume
from executors.run.run import view_of
from executors.view.report.trackers import TrackedReplica
from executors.worker import tracking

TRAIN, NOTES = "support.trackers:train", "support.trackers:Notes"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NOTES", str(tmp_path))
    return tmp_path


def noted(folder: Path, rank: int = 0, attempt: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{rank}-{attempt}").read_text().splitlines()]


def name_of(run: Run) -> str:
    """Return the name by which trackers distinguish runs with the same id."""
    return TrackedReplica(
        run_id=run.run_id, launched_at=view_of(run).record.created_at, rank=0, world_size=1, attempt=0
    ).run


def tracked_and_resumed(local: LocalProcessExecutor, tracker: str, env: dict[str, str]) -> Run:
    """Launch two replicas whose first attempts fail, and resume them."""
    run = launch(local, TRAIN, 2, args={"steps": 2, "fails_at": 1}, tracker=tracker, env=env)
    run.wait()
    resumed = resume(run, env=env)
    assert resumed.results() == [outcome.result for outcome in resumed.outcomes()], run.logs()
    assert "the tracker" not in run.logs(attempt="all")
    return resumed


def test_a_tracker_gets_the_numbers_of_each_rank_and_attempt_while_training_continues(
    local: LocalProcessExecutor, folder: Path
) -> None:
    run = tracked_and_resumed(local, NOTES, {"NOTES": str(folder)})
    for rank in range(2):
        first, again = noted(folder, rank), noted(folder, rank, 1)
        assert [notes[0]["name"] for notes in (first, again)] == [f"{name_of(run)} rank {rank}"] * 2
        assert first[0]["of"] == 2
        assert first[0]["begin"].items() >= {
            "run": run.run_id, "entrypoint": TRAIN, "replicas": 2, "backend": "local", "args.steps": 2,
        }.items()  # fmt: skip
        assert first[1] == {"step": 1, "loss": 1.0, "thread": "replicas-tracker"}
        assert [each.get("loss") for each in again[1:-1] if "loss" in each] == [1.0, 0.5]
        assert (first[-1], again[-1]) == ({"finish": False}, {"finish": True})
    assert view_of(run).record.settings.tracker == NOTES


def test_a_tracker_does_not_take_a_run_for_an_earlier_one_of_that_id(folder: Path) -> None:
    names = set()
    for _ in range(2):
        run = launch("inline", TRAIN, 1, tracker=NOTES, run_id="again")
        assert run.wait()
        (note,) = (each["name"] for each in noted(folder) if "name" in each)
        names.add(note)
        (folder / "0-0").unlink()
        run.remove()
    assert len(names) == 2


def test_the_tracker_of_rank_0_gets_the_page_of_the_run_as_it_is_at_its_end(
    local: LocalProcessExecutor, folder: Path
) -> None:
    run = launch(local, TRAIN, 2, tracker="support.trackers:KeepsPage", env={"NOTES": str(folder)})
    run.results()
    assert "the tracker" not in run.logs()
    name = f"{run.run_id}.html"
    assert [{"page": name} in noted(folder, rank) for rank in range(2)] == [True, False]
    page = (folder / name).read_text()
    assert [text in page for text in (f"<title>{run.run_id}", '"loss"')] == [True, True]


def test_a_page_that_takes_too_long_does_not_keep_a_tracker_from_its_finish(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracking, "FINISH_S", 60.0)
    monkeypatch.setattr(tracking, "PAGE_SHARE", 0.002)
    store_answers = threading.Event()
    tracked = TrackedReplica(run_id="slow", launched_at=0.0, rank=0, world_size=1, attempt=0)
    handing = tracking.Tracking("support.trackers:KeepsPage", tracked, lambda _: store_answers.wait())
    handing.start()
    handing.finish(has_succeeded=True, is_hurried=False)
    store_answers.set()
    assert noted(folder)[-1] == {"finish": True}
    error = capfd.readouterr().err
    assert error.endswith("'support.trackers:KeepsPage' did not get the page of the run: it was not written in time\n")


@pytest.mark.parametrize(
    ("tracker", "said"),
    [
        ("FailsToBegin", "cannot begin, so it gets no numbers: SystemExit: no such project"),
        ("FailsToLog", "refuses numbers, so some are missing there: OSError: the service is away"),
        ("FailsToFinish", "did not finish, so some numbers may be missing there: OSError: the service is away"),
        ("Hangs", "did not finish within 0 s, so some numbers may be missing there"),
        ("Missing", "cannot be loaded here, so it gets no numbers: AttributeError: "),
    ],
)
def test_a_tracker_that_fails_is_one_warning(
    folder: Path, capfd: pytest.CaptureFixture[str], tracker: str, said: str
) -> None:
    run = launch("inline", TRAIN, 1, tracker=f"support.trackers:{tracker}")
    assert len(run.results()) == 1
    error = capfd.readouterr().err
    assert f"replicas: rank 0: the tracker 'support.trackers:{tracker}' {said}" in error
    assert error.count("the tracker") == 1
    (warning,) = run.warnings()
    assert warning.text.startswith(f"the tracker 'support.trackers:{tracker}' {said}")
    (state,) = run.status().replicas
    assert state.warned is not None
    assert state.warned.count == 1


def test_a_tracker_that_run_json_alone_names_is_not_imported(folder: Path, local: LocalProcessExecutor) -> None:
    run = launch(local, TRAIN, 1, args={"fails_at": 1}, env={"NOTES": str(folder)})
    run.wait()
    record = json.loads(bytes(view_of(run).store.get(f"{run.run_id}/run.json")))
    changed = {**record, "settings": {**record["settings"], "tracker": NOTES}}
    view_of(run).store.put(f"{run.run_id}/run.json", json.dumps(changed).encode())
    with pytest.raises(Exception, match=r"its tracker is 'support.trackers:Notes', the launch's None"):
        resume(Run(view_of(run).store, run.run_id), env={"NOTES": str(folder)})
    assert not list(folder.glob("0-*"))


@pytest.mark.parametrize(
    ("tracker", "kind", "said"),
    [
        ("trackoi", ValueError, r"No tracker 'trackoi'. Did you mean 'trackio'\?|No tracker named 'trackoi'"),
        ("no.such:Class", ValueError, "there is no module 'no.such' on sys.path"),
        ("support.trackers:1", ValueError, "must be 'pkg.mod:Class', got"),
        (3, TypeError, "tracker must be a name"),
    ],
)
def test_a_launch_refuses_a_tracker_that_it_cannot_find(tracker: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        launch("inline", TRAIN, 1, tracker=tracker)


def test_a_launch_explains_how_to_install_the_package_of_a_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "site-packages" not in path])
    with pytest.raises(MissingDependencyError, match=r"Install it with: pip install wandb$"):
        launch("inline", TRAIN, 1, tracker="wandb")


def needs(package: str) -> pytest.MarkDecorator:
    is_missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(is_missing, reason=f"{package} is not installed: pip install {package}")


@needs("trackio")
def test_trackio_has_a_run_for_each_rank_that_its_next_attempt_continues_with(
    local: LocalProcessExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tracked_and_resumed(local, "trackio", {"TRACKIO_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1"})
    rows: dict[tuple[str, str], list[float]] = {}
    (database,) = tmp_path.glob("replicas*.db")
    with closing(sqlite3.connect(database)) as connection:  # otherwise Python 3.13 warns in a later test
        for name, text in connection.execute("SELECT run_name, metrics FROM metrics ORDER BY id"):
            rows.setdefault((name, "loss"), []).extend(v for k, v in json.loads(text).items() if k == "loss")
        configs = [json.loads(text) for (text,) in connection.execute("SELECT config FROM configs")]
        artifacts = [name for (name,) in connection.execute("SELECT name FROM artifacts")]
    assert rows == {(f"{name_of(run)} rank {rank}", "loss"): [1.0, 1.0, 0.5] for rank in range(2)}
    assert {config["args.steps"] for config in configs} == {2}
    assert artifacts == [run.run_id], "the page of the run"


@needs("wandb")
def test_wandb_offline_has_the_numbers_of_each_attempt(local: LocalProcessExecutor, tmp_path: Path) -> None:
    from wandb.proto import wandb_internal_pb2

    run = tracked_and_resumed(local, "wandb", {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)})
    found, artifacts = dict[str, list[float]](), set[str]()
    for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        of, losses = "", list[float]()
        for data in records_of_wandb(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                of = f"{record.run.run_group} {record.run.run_id} {record.run.display_name}"
            artifacts |= {record.request.log_artifact.artifact.name} - {""} | {record.artifact.name} - {""}
            losses += [
                json.loads(item.value_json)
                for item in record.history.item
                if (item.key or item.nested_key[0]) == "loss"
            ]
        found.setdefault(of, []).extend(losses)
    assert {of: sorted(losses) for of, losses in found.items()} == {
        f"{name_of(run)} {name_of(run)}-{rank} {name_of(run)} rank {rank}": [0.5, 1.0, 1.0] for rank in range(2)
    }
    assert artifacts == {run.run_id}, "the page of the run"


def records_of_wandb(data: bytes) -> Iterator[bytes]:
    """Yield the records of an offline run of W&B: a log in the format of LevelDB, in blocks of 32 KiB. W&B has no
    reader in Python.
    """
    at, whole = 7, b""
    while at + 7 < len(data):
        left = -at % 32768
        if 0 < left < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            yield whole
            whole = b""


@needs("mlflow")
def test_mlflow_has_a_run_for_each_rank_that_its_next_attempt_continues_with(
    local: LocalProcessExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    uri = tmp_path.as_uri()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = tracked_and_resumed(local, "mlflow", {"MLFLOW_TRACKING_URI": uri, "MLFLOW_ALLOW_FILE_STORE": "true"})
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("replicas")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(each.info.run_name for each in runs) == [f"{name_of(run)} rank {rank}" for rank in range(2)]
    for each in runs:
        assert (each.info.status, each.data.params["args.steps"]) == ("FINISHED", "2")
        assert each.data.tags["replicas.run"] == run.run_id
        losses = client.get_metric_history(each.info.run_id, "loss")
        assert [metric.value for metric in sorted(losses, key=lambda m: (m.timestamp, m.step))] == [1.0, 1.0, 0.5]
        pages = [each.path for each in client.list_artifacts(each.info.run_id)]
        assert pages == [f"{run.run_id}.html"] * each.info.run_name.endswith(" 0")
