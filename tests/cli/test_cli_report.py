"""`replicas report`: a run in any store, at any stage, as one page."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cli import HereInstead

from executors import LocalProcessExecutor, attach, launch
from executors.cli.documents import VERSION
from executors.run.run import view_of
from executors.testing import eventually
from executors.view.run_page import report_document


@pytest.fixture
def failed(here: HereInstead, local: LocalProcessExecutor) -> str:
    run = launch(local, "job:fail", 2, args={"ranks": [1], "message": "<b>boom</b>\x1b[31m"}, run_id="mine")
    assert run.wait(60)
    return run.url


def test_report_writes_a_page_named_after_the_run(here: HereInstead, failed: str) -> None:
    done = here.replicas("report", "mine")
    assert (done.code, done.stdout.startswith("Wrote mine.html (")) == (0, True)
    text = (here.folder.path / "mine.html").read_text()
    assert "RuntimeError: &lt;b&gt;boom&lt;/b&gt; (rank 1 of 2, job.py:" in text
    assert "last words" in text
    assert "argument message" in text


def test_report_prints_the_content_of_the_page_as_one_document(here: HereInstead, failed: str) -> None:
    made = here.replicas("report", failed, "--json").json
    shown = report_document(view_of(attach("mine")))
    assert made == {"version": VERSION, **shown, "as_of": made["as_of"]}
    assert (made["run_id"], made["status"], made["numbers"]["restarts"]) == ("mine", "failed", 0)
    assert [row["status"] for row in made["replicas"]] == ["succeeded", "failed"]
    assert not (here.folder.path / "mine.html").exists()
    assert here.replicas("report", "mine", "--json", "--out", "page.html").json["run_id"] == "mine"
    assert (here.folder.path / "page.html").exists()


def test_a_file_that_cannot_be_written_is_named(here: HereInstead, failed: str, tmp_path: Path) -> None:
    for out, why in ((tmp_path, "Is a directory"), (tmp_path / "no" / "page.html", "There is no such folder")):
        done = here.replicas("report", "mine", "--out", out)
        assert (done.code, str(out) in done.stderr, why in done.stderr) == (2, True, True), done
    assert here.replicas("report", "other").code == 2


def test_the_page_of_a_running_run_shows_the_time_of_its_data(
    here: HereInstead, local: LocalProcessExecutor, tmp_path: Path
) -> None:
    with launch(local, "job:hang", 2, run_id="live") as run:
        eventually(lambda: all("hanging" in run.logs(rank) for rank in range(2)))
        made = report_document(view_of(run))
        assert (made["is_live"], made["status"]) == (True, "running")
        assert made["in_short"][0]["text"].startswith("As of 20")
        assert run.report(tmp_path / "live.html") == tmp_path / "live.html"
        assert "2 running" in (tmp_path / "live.html").read_text()
