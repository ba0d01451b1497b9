"""Verbs on runs that are damaged, that have unusual names, or that belong to another user."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from servers.s3.server import S3Server
from support.cli import COMMAND, Folder, HereInstead
from support.hostile_records import run_json
from support.processes import is_alive

from executors import LocalProcessExecutor, launch
from executors.attempt import spare_key
from executors.errors import StoreError
from executors.registry.run_index import reference, remember
from executors.run.run import view_of
from executors.store import open_store
from executors.store.file import FileStore
from executors.store.records import to_bytes
from executors.store.s3.store import S3Store
from executors.testing import eventually

NOBODY = 65534


def test_a_rank_whose_records_cannot_be_read_is_named_and_the_others_are_shown(
    here: HereInstead, local: LocalProcessExecutor, state_home: Path
) -> None:
    run = launch(local, "job:main", 4, run_id="mine")
    assert run.wait(60)
    eventually(
        lambda: not is_alive(run.handles[0].metadata["supervisor_pid"]),
        "the supervisor has ended, so no process records outcomes",
    )
    records = state_home / "replicas" / "mine" / "replicas"
    (records / "0001" / "0" / "outcome.json").write_text("{}")
    (records / "0002" / "0" / "outcome.json").unlink()
    (records / "0002" / "0" / "handle.json").write_text("{}")
    for verb in ("status", "wait", "collect"):
        told = here.replicas(verb, "mine")
        assert told.code == (0 if verb == "status" else 1), told
        assert "'mine/replicas/0001/0/outcome.json' in file://" in told.stdout
        assert "'mine/replicas/0002/0/handle.json' in file://" in told.stdout
        row = here.replicas(verb, "mine", "--json").json
        assert row["exit_code"] == 1
        assert [row["replicas"][rank]["status"] for rank in (0, 3)] == ["succeeded"] * 2
    assert here.replicas("collect", "mine", "--out", "out").code == 1
    assert (here.folder.path / "out" / "3" / "output.log").exists()
    told = here.replicas("logs", "mine")
    assert "Note: Rank 2: 'mine/replicas/0002/0/handle.json'" in told.stderr
    assert here.replicas("rm", "mine").code == 0


def test_a_run_is_found_by_any_spelling_of_its_path(here: HereInstead, local: LocalProcessExecutor) -> None:
    folder = here.folder.path
    launch(local, "job:main", 1, run_id="mine", rendezvous=folder / "runs").wait()
    for spelling in ("runs/mine", "./runs/../runs/mine/", folder / "runs" / ".." / "runs" / "mine"):
        told = here.replicas("status", spelling, "--json")
        assert told.json["url"] == f"{(folder / 'runs').as_uri()}/mine"
    assert f"No run 'x' at {folder.as_uri()}." in here.replicas("status", "runs/../x").stderr
    assert "No run 'x' is known on this machine" in here.replicas("status", "x/").stderr


def test_a_column_that_no_one_reports_is_named_with_those_that_are(
    here: HereInstead, local: LocalProcessExecutor
) -> None:
    launch(local, "job:report_more", 1, run_id="mine").wait()
    for verb in ("status", "wait"):
        told = here.replicas(verb, "mine", "--columns", "gnrom,lr")
        assert told.code == 0
        assert told.stderr.startswith("Note: No column 'gnrom'. Did you mean 'gnorm'? Known: ")


def test_logs_cancel_and_rm_print_one_document(here: HereInstead, local: LocalProcessExecutor) -> None:
    run = launch(local, "job:hang", 2, run_id="mine")
    eventually(lambda: all("hanging" in run.logs(rank) for rank in (0, 1)))
    assert here.replicas("logs", "mine", "--json").json["replicas"] == [
        {"rank": 0, "members": None, "log": "hanging\n"},
        {"rank": 1, "members": None, "log": "hanging\n"},
    ]
    assert [row["rank"] for row in here.replicas("logs", "mine", "--json", "-r", 1).json["replicas"]] == [1]
    assert "Remove --json or --follow." in here.replicas("logs", "mine", "--json", "-f").stderr
    told = here.replicas("cancel", "mine", "--rank", 1, "--json").json
    assert (told["cancelled"], told["still_ending"]) == ([1], [])
    assert told["replicas"][1]["exit_code"] != 0
    told = here.replicas("rm", "mine", "gone", "--json")
    assert (told.code, [row["removed"] for row in told.json["runs"]]) == (2, [False, False])
    run.cancel()
    assert here.replicas("rm", "mine", "--json").json["runs"] == [{"run": "mine", "removed": True, "problem": None}]


def shared_with_a_group(folder: Path) -> None:
    """Make a folder in which other users can read runs."""
    folder.mkdir()
    folder.chmod(0o775)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
@pytest.mark.parametrize("locked", ["runs", "runs/mine", "runs/mine/replicas/0000/0/output.log"])
def test_the_error_names_a_folder_that_belongs_to_another_user(
    here: HereInstead, local: LocalProcessExecutor, tmp_path: Path, locked: str
) -> None:
    shared_with_a_group(tmp_path / "runs")
    launch(local, "job:main", 1, run_id="mine", rendezvous=tmp_path / "runs").wait()
    here.replicas("logs", tmp_path / "runs" / "mine")  # the whole import
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    (tmp_path / locked).chmod(0o700)
    store = FileStore(tmp_path / "runs")
    os.seteuid(NOBODY)
    try:
        with pytest.raises(StoreError, match=rf"Permission denied\. '{tmp_path / locked}' belongs to root\."):
            store.get("mine/replicas/0000/0/output.log")
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_folder_that_cannot_be_read_hides_no_other_run(
    here: HereInstead, local: LocalProcessExecutor, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    shared_with_a_group(runs)
    for run_id in ("mine", "private"):
        launch(local, "job:main", 1, run_id=run_id, rendezvous=runs).wait()
    here.replicas("ls", "--rendezvous", runs)  # the whole import
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    for name in ("private", "lost+found"):
        (runs / name).mkdir(exist_ok=True)
        (runs / name).chmod(0o700)
    os.seteuid(NOBODY)
    try:
        rows = here.replicas("ls", "--rendezvous", runs, "--json").json["runs"]
    finally:
        os.seteuid(0)
    assert [(row["run_id"], row["status"]) for row in rows] == [("private", "unreadable"), ("mine", "succeeded")]
    assert "Permission denied" in rows[0]["problem"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_home_that_may_not_be_entered_is_reported_with_the_variable_to_set(
    here: HereInstead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image of the container sets HOME=/root, and its user is not root."""
    for verb in NEED_A_HOME:
        here.replicas(*verb, *(["--dry-run"] if verb[0] == "launch" else []))  # the whole import
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    (home := tmp_path / "root").mkdir(mode=0o700)
    (home / ".local/state/replicas").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    os.seteuid(NOBODY)
    try:
        told = [here.replicas(*verb, "--json") for verb in NEED_A_HOME]
    finally:
        os.seteuid(0)
    for each in told:
        assert each.code == 2, each
        assert each.json["error"] == (
            f"Cannot keep runs in {home}/.local/state/replicas: Permission denied. "
            "Set XDG_STATE_HOME to a directory that you may write to."
        )


def test_the_error_for_a_user_without_a_home_names_the_variable_to_set(
    here: HereInstead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user is a number without a name, as in a container or a systemd unit without HOME."""
    without_a_home(monkeypatch)
    for verb in NEED_A_HOME:
        told = here.replicas(*verb, "--json")
        assert (told.code, told.json["kind"]) == (2, "StoreError"), told
        assert (
            told.json["error"] == "This user has no home directory to keep runs in. "
            "Set XDG_STATE_HOME to a directory that you may write to."
        )
    told = here.replicas("doctor", "--option", "preload=[]", "--json")
    assert (told.code, told.json["findings"][0]["state"]) == (1, "wrong"), told
    assert "This user has no home directory to keep runs in." in told.json["findings"][0]["found"]


NEED_A_HOME = (("ls",), ("status", "mine"), ("launch", "job:main", "--n", "1", "--option", "preload=[]"))


def without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody_knows(uid: int) -> None:
        raise KeyError(f"uid not found: {uid}")

    for name in ("HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody_knows)


def test_a_machine_without_a_place_for_runs_names_a_run_by_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica reads a run for a tracker. It needs no home, and makes no folder there."""
    for place in (tmp_path / "new", Path("/dev/null/there")):
        monkeypatch.setenv("XDG_STATE_HOME", str(place))
        assert reference("mine", "s3://bucket/runs") == "s3://bucket/runs/mine"
        assert not place.exists()
    without_a_home(monkeypatch)
    assert reference("mine", "s3://bucket/runs") == "s3://bucket/runs/mine"


def test_a_note_that_is_half_written_hides_no_run_and_stops_no_cancel(
    here: HereInstead, local: LocalProcessExecutor, state_home: Path, tmp_path: Path
) -> None:
    launch(local, "job:main", 1, run_id="mine").wait()
    there = tmp_path / "runs"
    with launch(local, "job:hang", 1, run_id="far", rendezvous=there) as run:
        eventually(lambda: "hanging" in run.logs(0))
        for run_id in ("mine", "far"):
            (state_home / "replicas" / run_id / "launched.json").write_text("")  # as after a power cut
        rows = {row["run_id"]: row for row in here.replicas("ls", "--json").json["runs"]}
        assert (rows["mine"]["status"], rows["far"]["status"]) == ("succeeded", "unreadable")
        assert "'far/launched.json' in file://" in rows["far"]["problem"]
        told = here.replicas("status", "far")
        assert (told.code, "as in 's3://BUCKET/PREFIX/far'" in told.stderr) == (2, True), told
        assert here.replicas("status", "far", "--rendezvous", there, "--json").json["status"] == "running"
        assert "hanging" in here.replicas("logs", "far", "--rendezvous", there).stdout
        assert here.replicas("cancel", "far", "--rendezvous", there, "--json").json["cancelled"] == [0]
    told = here.replicas("resume", "far", "--rendezvous", there)
    assert (told.code, "'far/launched.json' in file://" in told.stderr, "--task-digest" in told.stderr) == (2, 1, 1)
    assert here.replicas("rm", "far", "--rendezvous", there).code == 0
    assert [row["run_id"] for row in here.replicas("ls", "--json").json["runs"]] == ["mine"]
    assert here.replicas("rm", "mine").code == 0


def test_a_note_that_is_half_written_of_a_run_that_no_one_finds_is_removed_by_its_id(
    here: HereInstead, local: LocalProcessExecutor, state_home: Path, tmp_path: Path
) -> None:
    launch(local, "job:main", 1, run_id="far", rendezvous=tmp_path / "runs").wait()
    (state_home / "replicas" / "far" / "launched.json").write_text("")
    assert here.replicas("rm", "far").code == 0
    assert here.replicas("ls", "--json").json["runs"] == []
    assert here.replicas("status", "far", "--rendezvous", tmp_path / "runs", "--json").json["status"] == "succeeded"


def test_an_odd_id_in_a_missing_folder_is_one_sentence(here: HereInstead) -> None:
    for verb in ("status", "logs", "rm"):
        told = here.replicas(verb, "runs/My_Run")
        assert (told.code, told.stderr.count("Bad run id 'My_Run'")) == (2, 1), told


def test_a_run_that_is_removed_meanwhile_is_left_out_of_the_list(
    here: HereInstead, local: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run_id in ("mine", "other"):
        launch(local, "job:main", 1, run_id=run_id).wait()
    stat = Path.stat

    def vanishing(path: Path, **options: bool) -> os.stat_result:
        if path.name == "other":
            raise FileNotFoundError(path)
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", vanishing)
    assert [row["run_id"] for row in here.replicas("ls", "--json").json["runs"]] == ["mine"]


def test_runs_at_a_bucket_that_refuses_are_listed_and_it_is_asked_once(
    here: HereInstead, local: LocalProcessExecutor, s3: S3Server
) -> None:
    launch(local, "job:main", 1, run_id="mine").wait()
    for number in range(3):
        remember(f"away-{number}", s3.url("runs"))
    s3.misbehave(forbidden=["GET", "HEAD"])
    *rows, mine = sorted(here.replicas("ls", "--json").json["runs"], key=lambda row: row["run_id"])
    s3.misbehave()
    assert (mine["run_id"], mine["status"]) == ("mine", "succeeded")
    assert [(row["run_id"], row["status"]) for row in rows] == [(f"away-{i}", "unknown") for i in range(3)]
    assert all("403" in row["problem"] for row in rows)
    assert len(s3.requests("GET", "run.json")) == 1
    assert [row["run_id"] for row in here.replicas("ls", "--json").json["runs"]] == ["mine"], (
        "ls lists only the local run, because the bucket has no runs"
    )


def test_a_bucket_that_is_not_there_is_tried_once_for_each_list(
    here: HereInstead, s3_credentials: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember("away", "s3://bucket/runs?endpoint_url=http://127.0.0.1:9&region=x")
    defaults: Any = S3Store.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "sleep", lambda pause_s: pytest.fail(f"it waits for {pause_s:g} s and tries again"))
    (row,) = here.replicas("ls", "--json").json["runs"]
    assert (row["run_id"], row["status"], "127.0.0.1:9" in row["problem"]) == ("away", "unknown", True)


def test_spares_that_only_a_record_knows_are_not_asked_for(here: HereInstead, s3: S3Server) -> None:
    store = open_store(s3.url("runs"))
    store.put("mine/run.json", to_bytes(run_json(world_size=1, spares=300)))
    beat, end = ({"at": time.time()}, {"rank": 1, "attempt": 0, "status": "succeeded", "result": "rank 0, attempt 1"})
    for number, name, record in ((0, "heartbeat", beat), (1, "heartbeat", beat), (1, "outcome", end)):
        store.put(spare_key("mine", number, 0, f"{name}.json"), to_bytes(record))
    n_before = len(s3.requests())
    spares = here.replicas("status", "mine", "--rendezvous", store.url, "--json").json["spares"]
    assert spares[:3] == ["stands by", "became rank 0, attempt 1", "starts"]
    assert len(spares) == 300
    asked = [row["path"] for row in s3.requests()[n_before:]]
    assert len(asked) < 20, asked


def test_a_missing_boto3_hides_no_other_run(
    here: HereInstead, local: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(local, "job:main", 1, run_id="mine").wait()
    remember("away", "s3://bucket/runs-without-boto3")
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    away, mine = sorted(here.replicas("ls", "--json").json["runs"], key=lambda row: row["run_id"])
    assert (mine["run_id"], mine["status"]) == ("mine", "succeeded")
    assert (away["run_id"], away["status"], "needs boto3" in away["problem"]) == ("away", "unknown", True)


@pytest.mark.parametrize("at_launch", ["", "?endpoint_url=https://under_score"], ids=["variable", "url"])
def test_a_run_at_an_endpoint_that_is_not_a_url_hides_no_other_in_ls(
    here: HereInstead,
    local: LocalProcessExecutor,
    s3_credentials: None,
    monkeypatch: pytest.MonkeyPatch,
    at_launch: str,
) -> None:
    launch(local, "job:main", 1, run_id="mine").wait()
    remember("away", f"s3://bucket/runs{at_launch}")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    away, mine = sorted(here.replicas("ls", "--json").json["runs"], key=lambda row: row["run_id"])
    assert (mine["run_id"], mine["status"]) == ("mine", "succeeded")
    assert (away["run_id"], away["status"], "AWS_ENDPOINT_URL" in away["problem"]) == ("away", "unknown", True)
    removed = here.replicas("rm", "away")
    assert (removed.code, "Invalid endpoint" in removed.stderr) == (2, True), removed


def test_with_json_there_is_one_document_even_if_something_cannot_be_written(
    here: HereInstead, local: LocalProcessExecutor, tmp_path: Path
) -> None:
    launch(local, "job:main", 1, run_id="mine").wait()
    told = here.replicas("report", "mine", "--json", "--out", tmp_path / "no" / "page.html")
    assert (told.code, "There is no such folder" in told.json["error"]) == (2, True)
    (tmp_path / "out" / "results.json").mkdir(parents=True)
    told = here.replicas("collect", "mine", "--json", "--out", tmp_path / "out")
    assert (told.code, told.json["out"], told.json["run_id"]) == (1, None, "mine")
    assert "a file or folder of another kind is at this path" in told.json["error"]


def test_with_json_there_is_one_document_even_if_the_disk_fails(folder: Folder) -> None:
    script = (
        "import pathlib, sys\nfrom executors.cli import main\n"
        "def fail(path): raise OSError(5, 'Input/output error', str(path))\n"
        "pathlib.Path.iterdir = fail\nsys.exit(main())"
    )
    command = [sys.executable, "-c", script, "ls", "--json"]
    told = subprocess.run(command, cwd=folder.path, capture_output=True, text=True, check=False)
    assert told.returncode == 1, told
    assert json.loads(told.stdout)["kind"] == "OSError"
    assert told.stderr == f"Error: {json.loads(told.stdout)['error']}\n"


@pytest.mark.parametrize("arguments", [("report", "--out"), ("export", "--csv"), ("export", "--jsonl")])
def test_a_file_is_not_written_over_the_folder_itself(
    here: HereInstead, local: LocalProcessExecutor, arguments: tuple[str, str]
) -> None:
    launch(local, "job:main", 1, run_id="mine").wait()
    verb, option = arguments
    told = here.replicas(verb, "mine", option, ".")
    assert (told.code, told.stderr.splitlines()[0]) == (2, "Error: Cannot write to '.': Is a directory.")


def test_a_stdout_that_is_closed_is_not_a_traceback(folder: Folder) -> None:
    closed = ["sh", "-c", '"$@" 2>&1 >&-', "sh", *COMMAND, "ls"]
    told = subprocess.run(closed, cwd=folder.path, capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (0, "")


def test_cancel_of_a_rank_that_does_not_exist_cancels_no_one(here: HereInstead, local: LocalProcessExecutor) -> None:
    with launch(local, "job:hang", 2, run_id="mine") as run:
        told = here.replicas("cancel", "mine", "--rank", "0-3")
        assert (told.code, "Run 'mine' has no rank 2, but ranks 0-1." in told.stderr) == (2, True)
        assert not any(view_of(run).newest_attempt(rank).has("cancel.json") for rank in (0, 1))
