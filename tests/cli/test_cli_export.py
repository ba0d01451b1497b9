"""`replicas export` and `--tracker`, as a user gives them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli import HereInstead

from executors import LocalProcessExecutor, attach, launch
from executors.attempt import Attempt
from executors.run.run import view_of
from executors.testing import eventually

TRAIN = """
import time
from pathlib import Path
from executors import current_replica
from executors.metrics import recorder

def main():
    recorder.NEAR_S = 0.0
    for step in range(1, 4):
        current_replica().report(step=step, loss=1 / step, total_steps=3)
    while not Path("go").exists():
        time.sleep(0.02)
    current_replica().report(step=4, loss=0.25)

class Tracker:
    def __init__(self, tracked): Path(f"tracked-{tracked.rank}").write_text(str(tracked.config))
    def log(self, numbers, step, at): pass
    def finish(self, has_succeeded): pass
"""


@pytest.fixture
def live(here: HereInstead, local: LocalProcessExecutor) -> Iterator[str]:
    (here.folder.path / "live.py").write_text(TRAIN)
    with launch(local, "live.py", 2, run_id="mine"):
        yield "mine"


@pytest.mark.parametrize("formats", [("--csv", "--jsonl"), ("--csv", "--tensorboard")])
def test_export_refuses_one_file_for_two_formats(here: HereInstead, formats: tuple[str, str]) -> None:
    first, second = formats
    (here.folder.path / "link").symlink_to("out")
    done = here.replicas("export", "mine", first, "out", second, here.folder.path / "link")
    assert done.code == 2
    assert " is given for two formats. Give each format its own path." in done.stderr
    assert not (here.folder.path / "out").exists()


def test_an_export_follows_a_run_to_its_end(here: HereInstead, live: str) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install tensorboard")
    run = attach(live)
    eventually(lambda: len(run.metrics().numbers) >= 2, "both replicas have written a segment")
    files = ("--tensorboard", "events", "--csv", "run.csv", "--jsonl", "run.jsonl", "--json")
    first = here.replicas("export", live, *files).json
    assert (first["is_over"], first["rows"]) == (False, first["events"])
    (here.folder.path / "go").touch()
    second = here.replicas("export", live, *files, "-f").json
    assert second["is_over"]
    assert first["events"] + second["events"] == second["rows"] == len(run.metrics())
    assert here.replicas("export", live, *files, "-f").json["events"] == 0
    with (here.folder.path / "run.csv").open(newline="") as file:
        steps = [(line["rank"], line["step"]) for line in csv.DictReader(file) if line["step"]]
    assert {("0", "4"), ("1", "4")} <= {*steps}
    assert len((here.folder.path / "run.jsonl").read_text().splitlines()) == second["rows"]
    said = here.replicas("export", live, "--csv", "run.csv")
    assert said.stdout == f"Wrote {second['rows']} rows of mine to run.csv.\n"


def test_an_export_names_the_things_that_it_cannot_do(
    here: HereInstead, local: LocalProcessExecutor, tmp_path: Path
) -> None:
    run = launch(local, "job:report", 1, run_id="mine")
    run.results()
    for arguments, said in (
        ((), "No format was given. Add --tensorboard DIR, --csv FILE or --jsonl FILE."),
        (("--csv", tmp_path / "no" / "run.csv"), f"Cannot write to {str(tmp_path / 'no')!r}: There is no such folder."),
        (("--jsonl", "/dev/null"), "'/dev/null': Not a regular file"),
    ):
        done = here.replicas("export", "mine", *arguments)
        assert (done.code, said in done.stderr) == (2, True), done


def test_an_empty_file_or_folder_is_refused_and_nothing_is_written(
    here: HereInstead, local: LocalProcessExecutor
) -> None:
    launch(local, "job:report", 1, run_id="mine").results()
    before = sorted(here.folder.path.iterdir())
    verbs = {"collect": ["--out"], "report": ["--out"], "export": ["--tensorboard", "--csv", "--jsonl"]}
    for verb, option in ((verb, option) for verb, options in verbs.items() for option in options):
        done = here.replicas(verb, "mine", option, "")
        assert (done.code, f"{option} is empty" in done.stderr) == (2, True), done
    assert sorted(here.folder.path.iterdir()) == before


def test_a_tracker_is_named_by_an_option_a_settings_file_or_the_environment(
    here: HereInstead, local: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here.folder.path / "live.py").write_text(TRAIN)
    (here.folder.path / "go").touch()
    made = here.replicas("launch", "live.py", "--n", 1, "--tracker", "live:Tracker", "--dry-run", "--json").json
    assert (made["run_record"]["settings"]["tracker"], made["run_record"]["origins"]["tracker"]) == (
        "live:Tracker",
        "--tracker",
    )
    assert made["task_record"]["launched_with"]["settings"]["tracker"] == "live:Tracker"
    (here.folder.path / "replicas.toml").write_text('tracker = "live:Tracker"\n')
    assert here.replicas("launch", "live.py", "--n", 1, "--run-id", "one", "--json").code == 0
    assert "'replicas': 1" in (here.folder.path / "tracked-0").read_text()
    assert launch(local, "live.py", 2, config=True, run_id="two").results() == [None, None]
    task = Attempt(view_of(attach("two")).store, "two", 0).store.get("two/task/task.json")
    assert json.loads(bytes(task))["launched_with"]["settings"]["tracker"] == "live:Tracker"
    monkeypatch.setenv("REPLICAS_TRACKER", "trackoi")
    refused = here.replicas("launch", "live.py", "--n", 1)
    assert (refused.code, "Did you mean 'trackio'?" in refused.stderr) == (2, True), refused
    assert "The setting tracker is from REPLICAS_TRACKER." in refused.stderr
