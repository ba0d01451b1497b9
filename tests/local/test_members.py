"""Tests replicas of several processes, which the setting `procs` starts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from servers.isolation.gpu import write_torch
from support.processes import parent_of
from support.runs import pid_said

from executors import LocalProcessExecutor, launch
from executors.errors import LaunchError
from executors.process import start_time
from executors.protocol import Outcome, ReplicaStatus
from executors.run.run import Run, view_of

TASKS = """
import atexit, os, signal, sys, time
from pathlib import Path
from executors import current_replica

def meet(folder):
    replica = current_replica()
    Path(folder, f"ready-{replica.member}-{replica.attempt}").write_text(str(os.getpid()))
    while len(list(Path(folder).glob(f"ready-*-{replica.attempt}"))) < replica.members:
        time.sleep(0.01)
    return replica

def look(folder):
    replica = meet(folder)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "REPLICA_MEMBER",
             "REPLICA_MEMBERS", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE")
    seen = {name: os.environ.get(name) for name in names}
    print("half", end="")
    print(" a line")
    import json, random
    share = list(replica.shard(range(8))), list(replica.shard(range(8), per="replica"))
    found = {"env": seen, "share": share, "dice": random.random(), "shown": repr(replica.member)}
    Path(folder, f"seen-{replica.rank}-{replica.member}").write_text(json.dumps(found))
    return "of the leader" if replica.member == 0 else {1, 2}

def end(folder, how, who):
    replica = current_replica()
    atexit.register(lambda: Path(folder, f"atexit-{replica.member}").touch())
    try:
        meet(folder)
        if replica.member == who and replica.attempt == 0:
            if how == "raise":
                raise ValueError("no luck")
            if how == "exit":
                os._exit(7)
            if how == "leave":
                return
            os.kill(os.getpid(), getattr(signal, how))
        if replica.attempt == 0:
            time.sleep(0.2 if how == "leave" else 60)
        return replica.attempt
    finally:
        Path(folder, f"finally-{replica.member}").touch()

def repeat(folder):
    replica = meet(folder)
    error = ValueError("no luck")
    if replica.member:
        error.of_another_member = True
        Path(folder, "repeated").touch()
    while not Path(folder, "repeated").exists():
        time.sleep(0.01)
    raise error

def mark(folder):
    replica = meet(folder)
    for step in range(3000):
        replica.report(step=step)
        time.sleep(0.02)
        if step == 10 and replica.member == 0:  # as DiLoCo sends work
            replica.store.put_if_absent(f"{replica.run_id}/diloco/main/r0/contribution/0", b"x")

def together(folder):
    replica = current_replica()
    name = f"{replica.rank}.{replica.member}.{replica.attempt}"
    Path(folder, f"ready-{name}").touch()
    try:
        while len(list(Path(folder).glob(f"ready-*.{replica.attempt}"))) < replica.members * replica.world_size:
            time.sleep(0.01)
        if name == "0.1.0":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60 if replica.attempt == 0 else 0)
    finally:
        Path(folder, f"left-{name}").touch()

def hang(folder):
    replica = meet(folder)
    for step in range(3000 if replica.member == 0 else 5):
        replica.report(step=step)
        time.sleep(0.02)
    time.sleep(60)

def devices(folder):
    replica = current_replica()
    name = f"devices-{replica.rank}-{replica.member}"
    Path(folder, name).write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    return replica.members

def leave_gpu(folder, listed):
    replica = meet(folder)
    if replica.attempt == 0:
        if replica.member == listed:
            Path(folder, "listed").write_text(str(os.getpid()))
        while not Path(folder, "listed").exists():
            time.sleep(0.01)
        os._exit(3)
    return "free"

def check():
    replica = current_replica()
    print("checked", flush=True)
    return replica.member == 0

def close_all(folder):
    os.closerange(3, 256)
    KEPT.extend(open(f"{folder}/own-{os.environ['RANK']}-{number}", "w") for number in range(60))
    return "done"


KEPT = []


def start_helper(folder):
    import subprocess
    replica = meet(folder)
    saves = (
        "import pathlib, signal, sys, time\\n"
        "def save(*_):\\n    time.sleep(0.3); pathlib.Path(sys.argv[1] + '-saved').touch(); sys.exit()\\n"
        "signal.signal(signal.SIGTERM, save)\\n"
        "pathlib.Path(sys.argv[1] + '-begun').touch()\\n"
        "while True: time.sleep(0.05)"
    )
    subprocess.Popen([sys.executable, "-c", saves, f"{folder}/helper-{replica.member}"]).wait()  # run() would kill it

def save(folder):
    replica = current_replica()
    try:
        meet(folder)
        if replica.member:
            with replica.atomic():
                Path(folder, "begun").touch()
                time.sleep(1.5)  # longer than the grace
                Path(folder, "saved").touch()
        time.sleep(60)
    finally:
        Path(folder, f"finally-{replica.member}").touch()
"""

pytestmark = pytest.mark.usefixtures("state_home")


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Run]:
    (tmp_path / "member_tasks.py").write_text(TASKS)
    local = LocalProcessExecutor(preload=(), term_grace_s=1.0)

    def start(name: str, n: int = 1, procs: Any = 2, args: Any = (), executor: Any = local, **more: Any) -> Run:
        folder = {"folder": str(tmp_path)}
        return launch(
            executor, f"{tmp_path}/member_tasks.py:{name}", n, procs=procs, args={**folder, **dict(args)}, **more
        )

    return start


def ended(run: Run) -> Outcome:
    run.wait(60)
    (outcome,) = run.outcomes()
    assert outcome is not None
    return outcome


def test_the_member_that_raised_an_error_is_named_and_none_that_repeats_it(start: Callable[..., Run]) -> None:
    outcome = ended(start("repeat"))
    assert (outcome.member, outcome.error_line) == (0, "Member 0 of 2: ValueError: no luck")


def wait_for(folder: Path, *names: str) -> None:
    while not all((folder / name).exists() for name in names):
        time.sleep(0.01)


def test_each_member_has_the_variables_of_torchrun_and_the_result_is_the_leaders(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    import json

    outcome = ended(start("look"))
    assert (outcome.status, outcome.result) == (ReplicaStatus.SUCCEEDED, "of the leader")
    assert [end.exit_code for end in outcome.members] == [0, 0]
    seen = [json.loads((tmp_path / f"seen-0-{member}").read_text()) for member in (0, 1)]
    ports = {each["env"].pop("MASTER_PORT") for each in seen}
    assert len(ports) == 1
    for member, each in enumerate(seen):
        expected = {
            **dict.fromkeys(("RANK", "LOCAL_RANK", "REPLICA_MEMBER"), str(member)),
            **dict.fromkeys(("WORLD_SIZE", "REPLICA_MEMBERS"), "2"),
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "localhost",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": None,
        }
        assert each["env"] == expected
        assert each["share"] == [list(range(member, 8, 2)), list(range(8))]
    assert seen[0]["dice"] != seen[1]["dice"]
    assert sorted(outcome.output_tail.splitlines()) == ["[1] half a line", "half a line"]


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    ("how", "reason", "says"),
    [
        ("raise", "exception", "Member {} of 2 failed first.\nTraceback"),
        ("exit", "no_result", "Member {} of 2: Replica 0 of 1 ended by itself with exit code 7"),
        ("SIGKILL", "signal", "Member {} of 2: Replica 0 of 1 was ended by signal 9 (SIGKILL)."),
        ("SIGTERM", "signal", "Member {} of 2: Replica 0 of 1 was terminated by SIGTERM"),
    ],
)
def test_the_member_that_ended_badly_is_the_cause_and_the_others_leave_in_order(
    start: Callable[..., Run], tmp_path: Path, how: str, reason: str, says: str, who: int
) -> None:
    outcome = ended(start("end", args={"how": how, "who": who}))
    assert (outcome.reason, outcome.member) == (reason, who)
    assert str(outcome.error).startswith(says.format(who))
    assert {f"finally-{1 - who}", f"atexit-{1 - who}"} <= {*os.listdir(tmp_path)}
    assert outcome.members[1 - who].exit_code == 128 + signal.SIGTERM


def test_members_that_close_all_descriptors_leave_their_results_and_write_into_no_other_file(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    """Programs that become daemons do so. The file for the outcome would be closed, or be another file."""
    run = start("close_all")
    assert ended(run).result == "done"
    assert {file.read_text() for file in tmp_path.glob("own-*")} == {""}


def test_a_member_that_ended_with_0_is_waited_with(start: Callable[..., Run]) -> None:
    outcome = ended(start("end", args={"how": "leave", "who": 1}))
    assert (outcome.status, outcome.result) == (ReplicaStatus.SUCCEEDED, 0)


def test_a_killed_member_restarts_all_members_of_its_replica_and_of_no_other(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    outcome = ended(start("end", args={"how": "SIGKILL", "who": 1}, restarts=1))
    assert (outcome.status, outcome.attempt, outcome.result, outcome.how) == (ReplicaStatus.SUCCEEDED, 1, 1, "fork")
    assert {"ready-0-1", "ready-1-1"} <= {*os.listdir(tmp_path)}


def test_a_cancel_runs_the_finally_blocks_of_each_member_and_waits_for_one_that_saves(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start("save")
    wait_for(tmp_path, "begun")
    run.cancel()
    outcome = ended(run)
    assert (outcome.status, outcome.error) == (ReplicaStatus.CANCELLED, "Replica 0 was ended: cancelled by the user.")
    assert {"saved", "finally-0", "finally-1"} <= {*os.listdir(tmp_path)}


def test_members_of_a_killed_supervisor_end_and_only_the_leader_records_it(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start("end", args={"how": "SIGKILL", "who": 7})
    pids = [pid_said(tmp_path / f"ready-{member}-0") for member in (0, 1)]
    parent = parent_of(pids[0])
    assert parent is not None
    os.kill(parent, signal.SIGKILL)
    assert ended(run).reason == "lost"
    while any(start_time(pid) is not None for pid in pids):
        time.sleep(0.01)
    assert {"finally-0", "finally-1", "atexit-0", "atexit-1"} <= {*os.listdir(tmp_path)}


def test_the_time_limit_ends_all_members_and_runs_their_finally_blocks(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    outcome = ended(start("end", args={"how": "SIGKILL", "who": 7}, timeout=4))
    assert (outcome.reason, outcome.member) == ("timeout", None)
    assert outcome.error == "Replica 0 of 1 ran into its time limit of 4 s."
    assert {"finally-0", "finally-1", "atexit-0", "atexit-1"} <= {*os.listdir(tmp_path)}


def test_all_members_of_a_replica_whose_attempt_was_taken_over_end(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start("together", 2, restarts="1,together,backoff=0.05s:0.05s")
    wait_for(tmp_path, "left-0.0.1", "left-0.1.1", "left-1.0.1", "left-1.1.1")
    run.wait(60)
    first = view_of(run).newest_attempt(1).at(0).outcome()
    assert first is not None
    assert (first.reason, first.member) == ("fenced", None)
    assert {"left-1.0.0", "left-1.1.0"} <= {*os.listdir(tmp_path)}
    assert [outcome and outcome.status for outcome in run.outcomes()] == [ReplicaStatus.SUCCEEDED] * 2


def test_a_member_that_hangs_is_named_and_the_stacks_of_all_members_are_kept(start: Callable[..., Run]) -> None:
    run = start("hang", hang_timeout="2:60")
    outcome = ended(run)
    assert (outcome.reason, outcome.member) == ("hang", 1)
    assert outcome.headline.startswith("Member 1 of 2: Replica 0 of 1 made no progress for ")
    assert " Member 0: the main thread " in outcome.headline
    stacks = bytes(view_of(run).store.get(f"{run.run_id}/replicas/0000/0/{outcome.stacks[0]}")).decode()
    of_leader, of_other = stacks.partition("\nMember 0 of 2:\n")[2].split("\nMember 1 of 2:\n")
    assert "in hang" in of_leader
    assert "in hang" in of_other


def test_a_health_check_runs_in_every_member_and_one_that_fails_ends_the_attempt(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    outcome = ended(start("look", health_check=f"{tmp_path}/member_tasks.py:check"))
    assert (outcome.reason, outcome.member) == ("start_failed", 1)
    assert str(outcome.error).startswith("Member 1 of 2 failed first.\nThe health check ")
    assert sorted(line for line in outcome.output_tail.splitlines() if "checked" in line) == ["[1] checked", "checked"]


def test_processes_that_members_started_are_asked_to_end_and_have_the_grace_to_save(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start("start_helper", executor=LocalProcessExecutor(preload=(), term_grace_s=10.0))
    wait_for(tmp_path, "helper-0-begun", "helper-1-begun")
    run.cancel()
    assert ended(run).status is ReplicaStatus.CANCELLED
    assert {"helper-0-saved", "helper-1-saved"} <= {*os.listdir(tmp_path)}


def test_the_members_of_a_replica_share_its_gpus(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(write_torch(tmp_path / "gpu", sees_gpu=True))
    executor = LocalProcessExecutor(preload=(), gpus=["4", "5", "6", "7"])
    run = start("devices", 2, "gpu", executor=executor, gpu="H100:2")
    assert run.results() == [2, 2]
    seen = [{(tmp_path / f"devices-{rank}-{member}").read_text() for member in (0, 1)} for rank in (0, 1)]
    assert seen == [{"4,5"}, {"6,7"}]


@pytest.mark.parametrize("listed", [0, 1])
def test_a_restart_waits_until_each_member_is_gone_from_the_gpu(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: int
) -> None:
    (tmp_path / "tools").mkdir()
    tool = tmp_path / "tools" / "nvidia-smi"
    tool.write_text(
        f"#!/bin/sh\necho x >> {tmp_path}/asked\ntest $(wc -l < {tmp_path}/asked) -gt 4 || cat {tmp_path}/listed\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.syspath_prepend(write_torch(tmp_path / "gpu", sees_gpu=True))
    executor = LocalProcessExecutor(preload=(), gpus=["0"])
    more: Any = {"gpu": "H100", "restarts": "1,backoff=0.05s:0.05s"}
    run = start("leave_gpu", executor=executor, args={"listed": listed}, **more)
    outcome = ended(run)
    assert (outcome.attempt, outcome.result) == (1, "free")
    pid = (tmp_path / "listed").read_text()
    assert f"waiting until process {pid}, which has ended, is gone from the GPU" in run.logs(rank=0)


def test_procs_by_gpu_needs_a_gpu(start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(
        LaunchError, match=r"procs=gpu: this replica sees no GPU; give a number \(--procs 2\), or auto\. Those"
    ):
        start("look", procs="gpu")


def test_a_backend_without_a_supervisor_refuses_several_processes() -> None:
    with pytest.raises(ValueError, match=r"Backend 'inline' starts one process in each replica: got procs='2'"):
        launch("inline", "os:getcwd", 1, procs=2)


@pytest.mark.parametrize(
    ("fault", "reason", "exit_code", "says"),
    [
        ("kill", "signal", -9, "was ended by signal 9 (SIGKILL)."),
        ("exit:code=75", "no_result", 75, "ended by itself with exit code 75"),
        ("raise", "exception", 1, "RuntimeError: chaos: member 1 of rank 0 raises after contribution 1"),
    ],
)
def test_chaos_hits_the_process_that_it_names(
    start: Callable[..., Run], fault: str, reason: str, exit_code: int, says: str
) -> None:
    kind, _, more = fault.partition(":")
    spec = ",".join(filter(None, (f"{kind}:rank=0,when=after,member=1", more)))
    outcome = ended(start("mark", chaos=[spec]))
    assert (outcome.reason, outcome.member, outcome.exit_code) == (reason, 1, exit_code)
    assert says in str(outcome.error)
    assert "[1] chaos: member 1 of rank 0 " in outcome.output_tail


@pytest.mark.parametrize("how", ["lock", "gil"])
def test_chaos_makes_the_process_hang_that_it_names(start: Callable[..., Run], how: str) -> None:
    spec = f"hang:rank=0,when=after,member=1,how={how}"
    outcome = ended(start("mark", chaos=[spec], hang_timeout="1:2"))
    assert (outcome.reason, outcome.member) == ("hang", 1)


def test_chaos_for_a_process_that_no_replica_has_is_refused(start: Callable[..., Run]) -> None:
    with pytest.raises(ValueError, match=r"each replica has the processes 0 to 1, got member=2\."):
        start("look", chaos=["kill:rank=0,member=2"])
