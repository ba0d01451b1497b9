"""A hostile user owns the bucket and has written hostile records. The tests try every verb on all of them.

No code of the hostile user runs. No file of this machine is shown, or written outside of `--out`. No process of this
machine gets a signal. A record that cannot be read is one clear error with its name, and other runs are shown as usual.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers.s3.server import S3Server
from support import hostile_records as hostile
from support.cli import Folder, HereInstead
from support.hostile_records import outcome_json, run_json
from support.hostile_scene import (
    EVIL_BACKEND,
    VERBS,
    WITH_TRUST,
    Owner,
    OwnsBucket,
    OwnsDirectory,
    Victim,
    each_case,
    is_refused,
    python_api,
    write_good_run,
    write_run,
)
from support.processes import is_alive

from executors import attach
from executors.process import start_time
from executors.run.run import view_of

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def canary() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the victim, which ends at any signal."""
    code = "import time; print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.send_signal(signal.SIGKILL)


@pytest.fixture
def victim(
    tmp_path: Path,
    state_home: Path,
    canary: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Victim:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "evil_backend.py").write_text(EVIL_BACKEND)
    monkeypatch.syspath_prepend(tmp_path / "work")  # they may import it by its name
    return Victim(HereInstead(Folder(tmp_path / "work"), monkeypatch, capsys), tmp_path / "work", state_home, canary)


@pytest.fixture(params=["directory", "bucket"])
def owner(request: pytest.FixtureRequest, tmp_path: Path, s3: S3Server) -> Owner:
    if request.param == "bucket":
        return OwnsBucket(s3)
    return OwnsDirectory(tmp_path / "theirs")


@pytest.fixture
def directory(tmp_path: Path) -> OwnsDirectory:
    return OwnsDirectory(tmp_path / "theirs")


# run.json that cannot be read


def test_a_run_that_cannot_be_read_is_one_clear_error(victim: Victim, directory: OwnsDirectory) -> None:
    for name in each_case(directory, hostile.BAD_RUNS):
        directory.write("bad/run.json", hostile.BAD_RUNS[name])
        rows = {row["run_id"]: row for row in victim.lists(directory)}
        assert rows["bad"]["status"] == "unreadable"
        assert "'bad/run.json'" in rows["bad"]["problem"]
        assert (rows["good"]["status"], rows["good"]["problem"]) == ("succeeded", None)
        field, _, number = name.rpartition(" ")
        words = ["'bad/run.json'", *([repr(field)] if field in hostile.BAD_FIELDS else [])]
        for verb in WITH_TRUST if field not in hostile.BAD_FIELDS or number == "0" else ("status", "rm"):
            told = victim.uses(verb, directory)
            assert told.code == 0 if verb == "rm" else is_refused(told, *words)
        assert [row["run_id"] for row in victim.lists(directory)] == ["good"]


def test_the_same_in_a_bucket(victim: Victim, s3: S3Server) -> None:
    owner = OwnsBucket(s3)
    for name in each_case(owner, ["nothing", "deeper than any stack", "n 1"]):
        owner.write("bad/run.json", hostile.BAD_RUNS[name])
        rows = {row["run_id"]: row["status"] for row in victim.lists(owner)}
        assert rows == {"bad": "unreadable", "good": "succeeded"}
        python_api(owner)
        for verb in WITH_TRUST:
            told = victim.uses(verb, owner)
            assert told.code == 0 if verb == "rm" else is_refused(told, "'bad/run.json'")


def test_from_python_a_run_that_cannot_be_read_is_one_kind_of_error(directory: OwnsDirectory) -> None:
    for data in hostile.BAD_RUNS.values():
        directory.write("bad/run.json", data)
        python_api(directory)


def test_a_key_without_a_legal_run_id_is_not_a_run(victim: Victim, moto: S3Server) -> None:
    owner = OwnsBucket(moto)
    write_good_run(owner)
    for key in ("Bad Name/run.json", "..../run.json", "-x/run.json", "run.json", "\x1b[31m/run.json"):
        owner.write(key, json.dumps(run_json()).encode())
    assert [row["run_id"] for row in victim.lists(owner)] == ["good"]


def test_ten_thousand_replicas_are_looked_at_in_time(victim: Victim, directory: OwnsDirectory) -> None:
    write_run(directory, world_size=10_000)
    told = victim.uses("status --json", directory)
    assert told.json["world_size"] == 10_000


# run.json that asks for code


def test_no_code_comes_from_a_record(victim: Victim, owner: Owner) -> None:
    for name in each_case(owner, hostile.ASKS if isinstance(owner, OwnsDirectory) else ["an option that imports"]):
        write_run(owner, **hostile.ASKS[name])
        handle = {**hostile.local_handle(), "backend_name": hostile.ASKS[name].get("backend", "local")}
        owner.write("bad/replicas/0000/0/handle.json", json.dumps(handle).encode())
        rows = {row["run_id"]: row for row in victim.lists(owner)}
        assert (rows["bad"]["status"], rows["good"]["status"]) == ("unknown", "succeeded")
        assert rows["bad"]["problem"]
        python_api(owner)
        told = {verb: victim.uses(verb, owner) for verb in WITH_TRUST}
        shown = [told.pop(verb) for verb in [*told] if verb.split()[0] == "status"]
        for verb, result in told.items():
            is_refused(result, "backend" if verb != "resume" else "")
        for status in shown:
            assert status.code == 0, "status shows the run from the store alone"
            assert "The run" in status.stdout
            assert f"--backend {hostile.ASKS[name].get('executor', '')}" in status.stdout
        assert "evil_backend" not in sys.modules


def test_a_class_that_a_user_names_is_used(victim: Victim, directory: OwnsDirectory) -> None:
    write_run(directory, backend="popen", executor="support.third_party:PopenExecutor")
    directory.write("bad/replicas/0000/0/handle.json", b'{"rank": 0, "backend_name": "popen", "metadata": {"pid": 1}}')
    assert "--backend support.third_party:PopenExecutor" in victim.uses("status", directory).stdout
    told = victim.uses("status", directory, "bad", "--backend", "local")
    is_refused(told, "launched on the backend 'popen'")
    run = attach("bad", rendezvous=directory.url, executor="support.third_party:PopenExecutor")
    assert type(view_of(run).executor).__name__ == "PopenExecutor"
    told = victim.uses("status", directory, "bad", "--backend", "subprocess:Popen")
    is_refused(told, "'subprocess:Popen' is Popen, which is not an executor: it lacks launch_replicas")


# The other records


def test_an_outcome_that_cannot_be_read_is_named_by_every_verb(victim: Victim, directory: OwnsDirectory) -> None:
    for name in each_case(directory, hostile.BAD_OUTCOMES):
        write_run(directory)
        directory.write("bad/replicas/0000/0/outcome.json", hostile.BAD_OUTCOMES[name])
        verbs = tuple(WITH_TRUST) if name in hostile.NO_OBJECTS or name.endswith(" 0") else ("status", "cancel", "rm")
        name_all(victim, directory, "'bad/replicas/0000/0/outcome.json'", verbs, ("resume --trust-bucket", "resume"))


def test_a_handle_that_cannot_be_read_is_named_by_every_verb(victim: Victim, directory: OwnsDirectory) -> None:
    for name in each_case(directory, hostile.BAD_HANDLES):
        write_run(directory)
        directory.write("bad/replicas/0000/0/handle.json", hostile.BAD_HANDLES[name])
        verbs = tuple(WITH_TRUST) if name in hostile.NO_OBJECTS else ("status", "cancel", "rm")
        name_all(victim, directory, "handle", verbs, refused=("resume --trust-bucket", "resume", "cancel"))


def test_a_heartbeat_that_cannot_be_read_is_named(victim: Victim, directory: OwnsDirectory) -> None:
    for name in each_case(directory, hostile.ODD_BEATS):
        write_run(directory)
        directory.write("bad/replicas/0000/0/heartbeat.json", hostile.ODD_BEATS[name])
        for verb in ("status", "status --json", "wait"):
            told = victim.uses(verb, directory)
            assert "heartbeat.json'" in told.stdout, told
        python_api(directory)


def test_warnings_that_cannot_be_read_are_named_and_texts_of_others_are_not_obeyed(
    victim: Victim, directory: OwnsDirectory
) -> None:
    for name in each_case(directory, hostile.HOSTILE_WARNINGS):
        write_run(directory)
        directory.write("bad/replicas/0000/0/warnings.json", hostile.HOSTILE_WARNINGS[name])
        told = victim.here.replicas("events", "bad", "--rendezvous", directory.url)
        assert "'bad/replicas/0000/0/warnings.json'" in told.stderr, told
    write_run(directory)
    directory.write("bad/replicas/0000/0/warnings.json", json.dumps(hostile.LYING_WARNINGS).encode())
    directory.write("bad/replicas/0000/0/outcome.json", json.dumps(hostile.outcome_json(0)).encode())
    directory.write("bad/replicas/0001/0/outcome.json", json.dumps(hostile.outcome_json(1)).encode())
    for verb in ("events", "wait", "status"):
        told = victim.here.replicas(verb, "bad", "--rendezvous", directory.url)
        assert not {"\x1b", "\x9b", "\u202e", "\x00", "\r"} & {*(told.stdout + told.stderr)}, told
        assert verb == "status" or "<script>" in told.stdout


def test_decisions_that_cannot_be_read_are_named_and_lies_are_harmless(
    victim: Victim, directory: OwnsDirectory
) -> None:
    logs = {name: [hostile.BAD_DECISIONS[name]] for name in ("nothing", "kind 0", "start 9", "a megabyte")}
    logs["lies"] = [json.dumps(lie).encode() for lie in hostile.LYING_DECISIONS * 20]
    for name in each_case(directory, logs):
        write_run(directory, restarts="3")
        failed = outcome_json(0, status="failed", reason="signal")
        directory.write("bad/replicas/0000/0/outcome.json", json.dumps(failed).encode())
        for number, entry in enumerate(logs[name]):
            directory.write(f"bad/decisions/{number:06d}.json", entry)
        for verb in ("status", "status --json", "wait", "resume --trust-bucket")[: 3 if name == "lies" else 4]:
            told = victim.uses(verb, directory)
            assert name == "lies" or "'bad/decisions/000000.json'" in told.stdout + told.stderr, told
            assert not {"\x1b", "Traceback"} & {*told.stdout, *told.stderr.split()}, told
        python_api(directory)


def name_all(
    victim: Victim, owner: Owner, word: str, verbs: tuple[str, ...] = tuple(WITH_TRUST), refused: tuple[str, ...] = ()
) -> None:
    """Check that every verb names the record and shows the rest, and that `rm` removes the unreadable run."""
    listed = {row["run_id"]: row["status"] for row in victim.lists(owner)}
    assert listed.keys() == {"bad", "good"}
    assert listed["good"] == "succeeded"
    for verb in verbs:
        told = victim.uses(verb, owner)
        if verb in refused:
            is_refused(told, word if verb != "resume" else "--task-digest")
        elif verb not in ("cancel", "rm"):
            assert word in told.stdout + told.stderr, (verb, told)
        else:
            assert told.code == 0, (verb, told)


def test_the_other_records_in_a_bucket(victim: Victim, s3: S3Server) -> None:
    owner = OwnsBucket(s3)
    for record in each_case(owner, ["outcome", "handle", "heartbeat", "started"]):
        write_run(owner)
        owner.write(f"bad/replicas/0000/0/{record}.json", b"[]")
        python_api(owner)
        for verb in WITH_TRUST:
            victim.uses(verb, owner)
        assert {"run_id": "good", "status": "succeeded"}.items() <= victim.lists(owner)[-1].items()


def test_a_task_that_cannot_be_read_is_not_resumed(victim: Victim, directory: OwnsDirectory) -> None:
    for name in each_case(directory, hostile.BAD_TASKS):
        task = hostile.BAD_TASKS[name]
        write_run(directory, task_digest=hashlib.sha256(task).hexdigest())
        directory.write("bad/task/task.json", task)
        lost = outcome_json(0, status="failed", reason="lost")
        directory.write("bad/replicas/0000/0/outcome.json", json.dumps(lost).encode())
        is_refused(victim.uses("resume --trust-bucket", directory), "'bad/task/task.json'")
        is_refused(victim.uses("resume", directory), "--task-digest")
        assert victim.uses("status", directory).code == 0


@pytest.mark.parametrize("record", ["started", "cancel", "intent", "abort"])
def test_the_small_records_break_nothing(victim: Victim, directory: OwnsDirectory, record: str) -> None:
    for name in each_case(directory, ["nothing", "deeper than any stack", "three megabytes"]):
        write_run(directory)
        key = "bad/abort.json" if record == "abort" else f"bad/replicas/0000/0/{record}.json"
        directory.write(key, hostile.NO_OBJECTS[name])
        directory.write("bad/replicas/0000/0/handle.json", json.dumps(hostile.local_handle()).encode())
        assert {row["run_id"] for row in victim.lists(directory)} == {"bad", "good"}
        python_api(directory)
        for verb in VERBS:
            told = victim.uses(verb, directory)
            assert told.code in (0, 1, 2, 124, 130)
            if told.code == 2:
                is_refused(told)


# Handles that name processes, files and jobs


def test_no_process_is_signalled_and_no_file_is_shown_because_a_record_asks_for_it(
    victim: Victim, owner: Owner
) -> None:
    pid = victim.canary.pid
    place: dict[str, Any] = {
        "supervisor_pid": pid,
        "supervisor_started": start_time(pid),
        "state_dir": str(victim.secret),
    }
    log = victim.secret / "bad" / "replicas" / "0000" / "0" / "output.log"
    log.parent.mkdir(parents=True)
    log.write_text("the victim's own business\n")
    write_run(owner, world_size=1)
    owner.write("bad/replicas/0000/0/handle.json", json.dumps(hostile.local_handle(**place)).encode())
    claim = {"nonce": "n", "pid": pid, "pid_started": start_time(pid), "at": 1.7e9}
    owner.write("bad/replicas/0000/0/started.json", json.dumps(claim).encode())
    python_api(owner)
    for verb in VERBS:
        victim.uses(verb, owner)
    assert is_alive(pid)


def test_another_run_of_the_same_id_is_left_alone(victim: Victim, owner: Owner) -> None:
    """The hostile user knows the id of a private run of this machine, and gives the hostile run the same id."""
    mine = OwnsDirectory(victim.state)
    write_run(mine, world_size=1)
    mine.write("bad/replicas/0000/0/outcome.json", json.dumps(outcome_json(0)).encode())
    mine.write("bad/replicas/0000/0/output.log", b"the victim's own business\n")
    write_run(owner, world_size=1)
    for run_id in ("bad", "../bad", 5):
        handle = hostile.local_handle(run_id=run_id, store_url=victim.state.as_uri())
        owner.write("bad/replicas/0000/0/handle.json", json.dumps(handle).encode())
        python_api(owner)
        for verb in VERBS:
            if verb != "rm":
                victim.uses(verb, owner)
    owner.write("bad/replicas/0000/0/outcome.json", json.dumps(outcome_json(0)).encode())
    assert victim.uses("rm", owner).code == 0
    assert (victim.state / "bad" / "replicas" / "0000" / "0" / "output.log").exists()
    assert attach("bad").status().status == "succeeded"


def test_links_in_a_shared_directory_lead_nowhere(victim: Victim, directory: OwnsDirectory) -> None:
    mine = OwnsDirectory(victim.state)
    write_run(mine, "private", world_size=1)
    write_run(directory, world_size=1)
    replica = directory.path / "bad" / "replicas" / "0000" / "0"
    (replica / "artifacts").mkdir(parents=True)
    (replica / "artifacts" / "key").symlink_to(victim.secret / "output.log")
    (replica / "artifacts" / "all").symlink_to(victim.secret)
    assert "Skipped the artifact 'key' of rank 0" in victim.uses("collect --out", directory).stdout
    (replica / "outcome.json").symlink_to(victim.secret / "output.log")
    is_refused(victim.uses("status", directory), "symbolic link")
    (directory.path / "bad" / "replicas" / "0000").rename(directory.path / "aside")
    (directory.path / "bad" / "replicas" / "0000").symlink_to(victim.state / "private" / "replicas" / "0000")
    for verb in VERBS:
        victim.uses(verb, directory)
    assert not (victim.state / "private" / "replicas").exists(), "the victim's folder is untouched"
    assert sorted(path.name for path in victim.secret.iterdir()) == ["output.log"]


# Artifacts, and shown texts


def test_artifacts_under_odd_names_are_skipped_and_named_and_the_rest_is_collected(
    victim: Victim, moto: S3Server, tmp_path: Path
) -> None:
    owner = OwnsBucket(moto)
    write_run(owner, world_size=1)
    owner.write("bad/replicas/0000/0/outcome.json", json.dumps(outcome_json(0)).encode())
    for name in [*hostile.ODD_ARTIFACTS, "taken/below", "model/weights.bin"]:
        owner.write(f"bad/replicas/0000/0/artifacts/{name}", b"data")
    before = {path for path in tmp_path.rglob("*") if "brought" not in path.parts}
    told = victim.uses("collect --out", owner)
    assert told.code == 0, told
    kept = victim.folder / "brought" / "0" / "artifacts"
    found = sorted(str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file())
    assert found == ["model/weights.bin", "taken"]
    assert told.stdout.count("Skipped the artifact") >= 8, told
    assert "its name has an empty, '.' or '..' part" in told.stdout
    assert not Path("/tmp/absolute").exists()
    assert {path for path in tmp_path.rglob("*") if "brought" not in path.parts} <= before | {
        victim.state,
        victim.state.parent,
    }
    names = [artifact.name for artifact in attach("bad", rendezvous=owner.url).artifacts(0)]
    assert names == ["model/weights.bin", "taken", "taken/below"]
    is_refused(victim.uses("rm", owner), "under names that no run has")
    assert victim.lists(owner) == []


def test_a_file_whose_name_is_not_text_is_skipped_and_named(victim: Victim, directory: OwnsDirectory) -> None:
    write_run(directory, world_size=1)
    directory.write("bad/replicas/0000/0/outcome.json", json.dumps(outcome_json(0)).encode())
    folder = directory.path / "bad/replicas/0000/0/artifacts"
    folder.mkdir()
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe")).write_bytes(b"data")
    assert "Skipped the artifact" in victim.uses("collect --out", directory).stdout
    is_refused(victim.uses("rm", directory), "under names that no run has")


def test_a_result_may_be_as_deep_as_a_replica_may_return(victim: Victim, owner: Owner) -> None:
    deep: Any = 1
    for level in range(200):
        deep = {"a": deep} if level % 2 else [deep]
    write_run(owner, world_size=1)
    owner.write("bad/replicas/0000/0/outcome.json", json.dumps(outcome_json(0, result=deep)).encode())
    for verb in ("status", "status --json", "wait", "collect", "collect --out"):
        assert victim.uses(verb, owner).code == 0


def test_nothing_in_a_record_acts_on_the_terminal(victim: Victim, owner: Owner) -> None:
    write_run(owner, **hostile.SHOWN)
    result = {"summary": f"fine {hostile.ANSI}\nand [red]more[/red] {hostile.ANSI}"}
    said = {"error": f"Traceback\n{hostile.ANSI} Boom: [link=x]{hostile.ANSI}", "output_tail": "nothing"}
    owner.write("bad/replicas/0000/0/outcome.json", json.dumps(outcome_json(0, result=result)).encode())
    failed = outcome_json(1, status="failed", reason="exception", host=hostile.ANSI, **said)
    owner.write("bad/replicas/0001/0/outcome.json", json.dumps(failed).encode())
    for beat in hostile.LYING_BEATS.values():
        owner.write("bad/replicas/0000/0/heartbeat.json", json.dumps(beat).encode())
        victim.lists(owner)
        for verb in ("status", "status --json", "wait", "collect", "cancel", "resume"):
            told = victim.uses(verb, owner)
            if verb in ("status", "wait"):
                assert "Boom: [link=x]" in told.stdout, told  # shown as it was written
    assert "and [red]more[/red]" in victim.uses("wait", owner).stdout
