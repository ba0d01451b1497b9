"""A replica in a container: `python -m executors.worker`, started by the bootstrap on a machine of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from servers.isolation.gpu import write_torch
from servers.s3.server import S3Server
from support.processes import is_alive
from support.standalone_replicas import (
    LIMIT_S,
    Cloud,
    ended,
    outcome_of,
    running_cloud,
    ship,
    wait_for_line,
    write_files,
)

from executors import attach, open_store
from executors.attempt import Attempt
from executors.native import RunSpec
from executors.shipping.package import replica_environment
from executors.store.url import address_of
from executors.supervision.decisions import DecisionLog

ROOT = Path(__file__).parents[2]

TASKS = """
import ctypes, multiprocessing, os, signal, subprocess, sys, threading, time
from pathlib import Path
from executors import current_replica

HOME = Path(os.environ["HOME"])

def fails():
    print("about to fail")
    raise ValueError("the user's own words")

def leaves():
    print("usage: job.py\\njob.py: error: no --lr")
    sys.exit(5)

def waits():
    current_replica().report(step=7)
    try:
        print("waiting", flush=True)
        threading.Event().wait()
    finally:
        (HOME / "cleaned up").touch()

def cleans_slowly():
    try:
        print("waiting", flush=True)
        threading.Event().wait()
    finally:
        print("cleaning", flush=True)
        while not (HOME / "go on").exists():
            time.sleep(0.01)

def ignores():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    current_replica().report(step=7)
    (HOME / "helper").write_text(str(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid))
    print("ignoring", flush=True)
    threading.Event().wait()

def half_a_line(ignores_sigterm):
    if ignores_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("a line")
    print("half a line", end="")
    threading.Event().wait()

def talks():
    sys.stdout.write("x" * 100_000 + "\\n")
    sys.stdout.buffer.write(b"as bytes\\n")
    sys.stdout.flush()
    print("on stderr: \\N{OTTER}", file=sys.stderr)
    print("no newline", end="")
    return sys.stdin.read()

def spawns():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map(twice, [1, 2])

def twice(x):
    return 2 * x

def dies(how):
    print("the last words")
    sys.stdout.write("half a line")
    if how == "segfault":
        ctypes.string_at(0)
    os.kill(os.getpid(), signal.SIGKILL)

def holds_the_gil(times=1):
    current_replica().report(step=7)
    if current_replica().attempt >= times:
        return "came back"
    print("holding", flush=True)
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

def takes_memory():
    print("taking", flush=True)
    bytearray(1 << 30)

def shows():
    return [Path("/proc/self/oom_score_adj").read_text().strip(), os.getppid() != 0]

def comes_back(times):
    attempt = current_replica().attempt
    print("attempt", attempt, flush=True)
    if attempt < times:
        os.kill(os.getpid(), signal.SIGKILL)
    return attempt
"""
NOTICE = {"REPLICA_NOTICE_S": "5"}  # as long as a replica has after SIGTERM, which it then gets at once


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    with running_cloud(tmp_path) as cloud:
        yield cloud


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return write_files(tmp_path / "work space", tasks_of_user=TASKS)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    return tmp_path / "shared directory"


def reported(spec: RunSpec) -> list[object]:
    """Return what the run's segments hold of `report`."""
    return [row.values for row in attach(address_of(spec.store_url, spec.run_id)).metrics().numbers]


# Whole runs


def test_two_replicas_run_a_callable_through_a_bucket_and_another_machine_attaches(
    cloud: Cloud, workspace: Path, s3: S3Server
) -> None:
    def of_a_notebook(value: int) -> dict[str, object]:
        from executors import current_replica

        replica = current_replica()
        return {"value": 3 * value, "rank": replica.rank, "world_size": replica.world_size}

    spec = ship(s3.url("runs"), workspace, of_a_notebook, {"value": 7}, n=2)
    processes = [cloud.start(spec, rank) for rank in spec.ranks]
    assert [ended(process) for process in processes] == [(0, "", "")] * 2
    run = attach(address_of(spec.store_url, spec.run_id))
    assert run.results() == [{"value": 21, "rank": rank, "world_size": 2} for rank in (0, 1)]
    code = run.record.code
    assert code is not None
    assert code["n_files"] == 1
    assert code["size_bytes"] == len(TASKS)
    assert (code["commit"], code["dirty"]) == (None, None)
    keys = [entry.key for entry in run.store.list("otter/task/")]
    assert sorted(keys) == ["otter/task/callable.pkl", "otter/task/code.tar.gz", "otter/task/task.json"]


def test_every_form_of_entrypoint_is_found_in_the_workspace_and_ours_are_not_shadowed(
    cloud: Cloud, tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import json, executors.replica, executors\ndef f(): return [json.__name__, executors.__file__]"
    workspace = tmp_path / "work space"
    write_files(workspace / "pkg_of_user", __init__="", mod=text)
    write_files(workspace / "scripts", file_of_user=text)
    write_files(workspace / "src", module_in_src=text)
    write_files(workspace, executors="raise SystemExit('the wrong executors')", diloco="")
    monkeypatch.syspath_prepend(str(workspace / "src"))  # which the launcher imports from
    entrypoints = "pkg_of_user.mod:f", "pkg_of_user.mod.f", "scripts/file_of_user.py:f", "module_in_src:f"
    for number, entrypoint in enumerate(entrypoints):
        spec = ship(shared, workspace, entrypoint, run_id=f"form-{number}")
        assert ended(cloud.start(spec)) == (0, "", ""), entrypoint
        assert "/packages/executors/" in outcome_of(spec).result[1], entrypoint


def test_helpers_that_it_spawns_find_the_users_modules(cloud: Cloud, workspace: Path, shared: Path) -> None:
    spec = ship(shared, workspace, "tasks_of_user:spawns")
    assert ended(cloud.start(spec)) == (0, "", "")
    assert outcome_of(spec).result == [2, 4]


@pytest.mark.slow
def test_replicas_train_one_model_together_through_a_bucket(cloud: Cloud, workspace: Path, s3: S3Server) -> None:
    def train_together(steps: int) -> dict[str, object]:
        import torch

        from diloco import DiLoCo

        torch.set_num_threads(1)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        with DiLoCo(model, inner_steps=5, total_steps=steps) as diloco:
            while diloco.inner_step < steps:
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                diloco.step()
            anchor = {name: values.tolist() for name, values in diloco.anchor().items()}
        return {"rounds": diloco.rounds, "anchor": anchor}

    spec = ship(s3.url("runs"), workspace, train_together, {"steps": 25}, n=2)
    processes = [cloud.start(spec, rank) for rank in spec.ranks]
    assert [ended(process)[0] for process in processes] == [0, 0]
    first, second = (outcome_of(spec, rank).result for rank in spec.ranks)
    assert first["rounds"] == 5
    assert first == second


# How it ends


@dataclass
class Site:
    """A cloud, the user's tasks, and a directory that both sides see."""

    cloud: Cloud
    workspace: Path
    shared: Path

    def start(
        self,
        task: str,
        rank: int = 0,
        *,
        args: Mapping[str, Any] | None = None,
        n: int = 1,
        timeout_s: float | None = None,
        run_id: str = "otter",
        within: Sequence[str] = (),
        **more: Any,
    ) -> tuple[RunSpec, subprocess.Popen[str]]:
        spec = ship(self.shared, self.workspace, f"tasks_of_user:{task}", args, n=n, run_id=run_id)
        spec = replace(spec, **more)
        return spec, self.cloud.start(spec, rank, timeout_s=timeout_s, environ=NOTICE, within=within)


@pytest.fixture
def site(cloud: Cloud, workspace: Path, shared: Path) -> Site:
    return Site(cloud, workspace, shared)


def test_an_exception_leaves_its_traceback_and_the_end_of_the_output_and_an_exit_code_is_kept(site: Site) -> None:
    spec, process = site.start("fails")
    code, out, err = ended(process)
    outcome = outcome_of(spec)
    assert (code, outcome.exit_code, outcome.reason) == (1, 1, "exception")
    assert outcome.headline == "ValueError: the user's own words"
    assert outcome.error_place == "tasks_of_user.py:10"
    assert str(outcome.error).rstrip() in out
    assert "executors/" not in str(outcome.error)
    assert out.startswith("about to fail\n")
    assert (outcome.output_tail, err) == (out, "")
    spec, process = site.start("leaves", run_id="leaves")
    assert ended(process)[0] == 5
    assert (outcome_of(spec).reason, outcome_of(spec).exit_code) == ("no_result", 5)
    assert outcome_of(spec).headline.endswith("a result. Its last line was: job.py: error: no --lr")


def test_the_last_64_kib_of_both_streams_are_kept_and_all_of_it_goes_on(site: Site) -> None:
    spec, process = site.start("talks")
    code, out, err = ended(process)
    outcome = outcome_of(spec)
    assert (code, outcome.result) == (0, "")  # nothing is to be read from stdin
    assert out == "x" * 100_000 + "\nas bytes\non stderr: \N{OTTER}\nno newline", "both go one way, in order"
    assert err == ""
    assert outcome.output_tail.endswith("xx\nas bytes\non stderr: \N{OTTER}\nno newline")
    assert len(outcome.output_tail.encode()) == 64 << 10


@pytest.mark.parametrize(("how", "number", "code"), [("kill", signal.SIGKILL, 137), ("segfault", signal.SIGSEGV, 139)])
def test_a_replica_that_dies_leaves_an_outcome_with_all_that_it_printed(
    site: Site, how: str, number: signal.Signals, code: int
) -> None:
    spec, process = site.start("dies", args={"how": how})
    exit_code, out, _ = ended(process)
    outcome, error = outcome_of(spec), f"Replica 0 of 1 was ended by signal {number:d} ({number.name})."
    assert (exit_code, outcome.exit_code, outcome.reason, outcome.signal) == (code, -number, "signal", number.name)
    assert outcome.error == error
    assert outcome.output_tail == f"the last words\nhalf a line\n{error}\n"
    assert out.startswith("the last words\n")
    assert out.endswith(f"\n{error}\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_notice_of_the_containers_end_runs_finally_and_is_in_the_outcome(site: Site, number: signal.Signals) -> None:
    spec, process = site.start("waits", 1, n=4)
    wait_for_line(process, "waiting")
    process.send_signal(number)
    assert ended(process)[0] == 143
    outcome = outcome_of(spec, 1)
    assert (site.cloud.folder / "cleaned up").exists()
    assert (outcome.status, outcome.reason, outcome.exit_code) == ("failed", "signal", 143)
    assert (outcome.signal, outcome.notice) == (number.name, number.name)
    assert outcome.error == f"Replica 1 of 4 was terminated by {number.name}, not sent by `replicas`."
    assert outcome.output_tail == f"waiting\n{outcome.error}\n"
    assert reported(spec) == [{"step": 7}]


def test_a_replica_that_holds_the_gil_leaves_an_outcome_at_its_time_limit(site: Site) -> None:
    spec, process = site.start("holds_the_gil", timeout_s=3)
    assert ended(process)[0] == 124
    outcome = outcome_of(spec)
    assert (outcome.status, outcome.reason) == ("failed", "timeout")
    assert outcome.error == "Replica 0 of 1 ran into its time limit of 3 s."
    assert outcome.output_tail == f"holding\n{outcome.error}\n"


def test_a_replica_that_dies_comes_back_in_its_container(site: Site) -> None:
    spec, process = site.start("comes_back", args={"times": 2}, restarts="2,backoff=0s")
    assert ended(process)[0] == 0
    ends = [outcome_of(replace(spec, attempt=number)) for number in range(3)]
    assert [(end.reason, end.result) for end in ends] == [("signal", None), ("signal", None), (None, 2)]
    assert [end.output_tail.splitlines()[0] for end in ends] == ["attempt 0", "attempt 1", "attempt 2"]
    assert attach(address_of(spec.store_url, spec.run_id)).results() == [2]
    assert len({end.pid for end in ends}) == 3


def test_a_replica_that_is_used_up_leaves_the_exit_code_of_its_last_end(site: Site) -> None:
    spec, process = site.start("comes_back", args={"times": 9}, restarts="1,backoff=0s")
    assert ended(process)[0] == 137
    log = DecisionLog(open_store(spec.store_url), spec.run_id).read()
    assert [(entry.kind, entry.ended, entry.how, entry.why) for entry in log] == [
        ("restart", 0, "fork", ""),
        ("give_up", 1, None, "budget"),
    ]


def test_a_hang_is_ended_and_the_replica_comes_back_in_its_container(site: Site) -> None:
    spec, process = site.start("holds_the_gil", restarts="1,backoff=0s", hang="1s:2s")
    code, out, _ = ended(process)
    first, second = (outcome_of(replace(spec, attempt=number)) for number in (0, 1))
    assert (code, second.result) == (0, "came back")
    assert (first.reason, first.reached, first.marks) == ("hang", {"step": 7}, 1)
    assert "made no progress for" in str(first.error)
    assert "the GIL is held by a call" in str(first.error)
    assert "in holds_the_gil" in out, "the stacks"


def test_a_replica_that_the_kernel_killed_for_want_of_memory_says_so(site: Site, small_memory: Path) -> None:
    join = f'echo $$ > {small_memory}/cgroup.procs && exec "$@"'
    spec, process = site.start("takes_memory", within=("sh", "-c", join, "sh"))
    assert ended(process)[0] == 137
    outcome = outcome_of(spec)
    assert (outcome.reason, outcome.exit_code) == ("oom", -signal.SIGKILL)
    assert outcome.output_tail == f"taking\n{outcome.error}\n"


def test_the_kernel_takes_the_replica_before_its_supervisor(site: Site) -> None:
    own = int(Path("/proc/self/oom_score_adj").read_text())
    spec, process = site.start("shows")
    assert ended(process)[0] == 0
    assert outcome_of(spec).result[0] == str(min(1000, own + 500))


def test_where_no_processes_and_control_groups_can_be_seen_a_replica_runs_and_comes_back(
    site: Site, s3: S3Server
) -> None:
    hide = 'mount -t tmpfs none /proc && mount -t tmpfs none /sys && exec "$@"'
    sandbox = ("unshare", "-rm", "sh", "-c", hide, "sh")
    if subprocess.run([*sandbox, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("no file systems can be mounted here")
    spec = ship(s3.url("runs"), site.workspace, "tasks_of_user:comes_back", {"times": 1})
    spec = replace(spec, restarts="1,backoff=0s")
    code, out, err = ended(site.cloud.start(spec, within=sandbox))
    assert code == 0, out + err
    assert outcome_of(spec).reason == "signal"
    assert outcome_of(replace(spec, attempt=1)).result == 1


def test_an_attached_run_that_nobody_watches_ends(site: Site) -> None:
    spec, process = site.start("waits", lease_s=1.0)
    assert ended(process)[0] == 143
    outcome = outcome_of(spec)
    assert (outcome.status, outcome.reason) == ("cancelled", "cancelled")
    assert outcome.error == (
        "Replica 0 was ended: nobody watched this attached run for 0.0167 min; launch with --detach to let it go on."
    )


def test_after_a_notice_nothing_comes_back(site: Site) -> None:
    spec, process = site.start("waits", restarts="3")
    wait_for_line(process, "waiting")
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 143
    assert outcome_of(spec).notice == "SIGTERM"
    assert DecisionLog(open_store(spec.store_url), spec.run_id).read() == []


def test_a_second_sigterm_does_not_cost_the_outcome(site: Site) -> None:
    spec, process = site.start("cleans_slowly")
    for line in ("waiting", "cleaning"):
        wait_for_line(process, line)
        process.send_signal(signal.SIGTERM)
    (site.cloud.folder / "go on").touch()
    assert ended(process)[0] == 143
    assert outcome_of(spec).reason == "signal"


def test_a_cancel_marker_makes_sigterm_a_cancellation_and_keeps_a_late_replica_from_starting(site: Site) -> None:
    spec, process = site.start("waits")
    wait_for_line(process, "waiting")
    Attempt(open_store(site.shared), spec.run_id, 0).request_cancel()
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 143
    outcome = outcome_of(spec)
    assert (outcome.status, outcome.reason) == ("cancelled", "cancelled")
    assert outcome.error == "Replica 0 was ended: cancelled by the user."
    assert reported(spec) == [{"step": 7}]
    spec = ship(site.shared, site.workspace, "tasks_of_user:waits", run_id="late")
    Attempt(open_store(site.shared), spec.run_id, 0).request_cancel()
    assert ended(site.cloud.start(spec)) == (143, "", "")
    assert outcome_of(spec).status == "cancelled"


def test_its_time_limit_ends_it_and_finally_runs(site: Site) -> None:
    spec, process = site.start("waits", 1, n=4, timeout_s=2.5)
    assert ended(process)[0] == 143
    outcome = outcome_of(spec, 1)
    assert (outcome.status, outcome.reason, outcome.exit_code) == ("failed", "timeout", 143)
    assert outcome.error == "Replica 1 of 4 ran into its time limit of 2.5 s."


def test_a_replica_that_ignores_sigterm_is_ended_with_all_it_started(site: Site) -> None:
    helper = site.cloud.folder / "helper"
    for timeout_s in (2, 8, 32):  # the shortest in which this machine gets as far as to ignore it
        spec, process = site.start("ignores", timeout_s=timeout_s, run_id=f"limit-{timeout_s}")
        code, out, _ = ended(process)
        if helper.exists():
            break
    outcome = outcome_of(spec)
    assert (code, outcome.reason, outcome.exit_code) == (124, "timeout", -signal.SIGKILL)
    assert outcome.error == f"Replica 0 of 1 ran into its time limit of {timeout_s} s."
    assert outcome.output_tail == out == f"ignoring\n{outcome.error}\n"
    assert reported(spec) == [{"step": 7}]
    assert not is_alive(int(helper.read_text()))


@pytest.mark.parametrize("ignores_sigterm", [False, True])
def test_the_outcome_of_a_replica_out_of_time_has_all_that_it_printed_and_how_it_ended_last(
    site: Site, ignores_sigterm: bool
) -> None:
    args = {"ignores_sigterm": ignores_sigterm}
    spec = ship(site.shared, site.workspace, "tasks_of_user:half_a_line", args)
    _, out, _ = ended(site.cloud.start(spec, timeout_s=3))
    outcome, how = outcome_of(spec), "Replica 0 of 1 ran into its time limit of 3 s."
    assert outcome.error == how
    assert outcome.output_tail == f"a line\nhalf a line\n{how}\n"
    assert ignores_sigterm or out == outcome.output_tail


def test_the_time_limit_counts_from_the_start_of_the_entrypoint(site: Site) -> None:
    spec = ship(site.shared, site.workspace, "tasks_of_user:talks")
    process = site.cloud.start(spec, timeout_s=1000.0, environ={"REPLICA_BOOTSTRAP_S": "999.999"})
    assert ended(process)[0] == 0, "what was installed before took as long as the limit"


def test_a_replica_does_not_start_where_torch_does_not_see_the_gpu_that_was_asked_for(site: Site) -> None:
    driver = "#!/bin/sh\necho 550.54.15\n"
    tools = site.cloud.folder / "bin"
    tools.mkdir(parents=True)
    (tools / "nvidia-smi").write_text(driver)
    (tools / "nvidia-smi").chmod(0o755)
    for sees_gpu, reason in ((False, "start_failed"), (True, None)):
        spec = ship(site.shared, site.workspace, "tasks_of_user:talks", run_id=f"gpu-{sees_gpu}".lower())
        torch = write_torch(site.cloud.folder / f"torch {sees_gpu}", sees_gpu=sees_gpu)
        environ = {"REPLICA_GPU": "H100:2", "PYTHONPATH": str(torch), "PATH": f"{tools}:{os.environ['PATH']}"}
        code, out, _ = ended(site.cloud.start(spec, environ=environ))
        outcome = outcome_of(spec)
        assert (code, outcome.reason) == (0 if sees_gpu else 1, reason), out
        if not sees_gpu:
            (torch / "jax.py").touch()
            write_files(site.workspace, of_jax="import jax\ndef main(): ...")
            spec = ship(site.shared, site.workspace, "of_jax", run_id="of-jax")
            assert ended(site.cloud.start(spec, environ=environ))[0] == 0, "it does not train with torch"
    spec = ship(site.shared, site.workspace, "tasks_of_user:talks", run_id="of-before")
    assert outcome_of(replace(spec, run_id="gpu-false")).error == (
        "gpu='H100:2' was asked for, and torch sees no GPU: torch 2.13.0 is built for CUDA 13.0. The NVIDIA driver is "
        "550.54.15: if that is too old for this CUDA, require an older torch or choose an image with one. If this "
        "trains with jax or tensorflow, import that at the top of the entrypoint's file."
    )


# What it is given


def test_other_versions_than_the_launchers_are_told_before_the_entrypoint_is_loaded(
    cloud: Cloud, tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = write_files(tmp_path / "work space", loud_of_user="print('loaded')\ndef main(): ...")
    launchers = {"python_version": "3.99.1", "torch": "1.0.0"}
    monkeypatch.setattr("executors.task.stored.versions_here", lambda: launchers)
    spec = ship(shared, workspace, "loud_of_user")
    code, out, _ = ended(cloud.start(spec))
    here = "{}.{}".format(*sys.version_info)
    torch = version("torch").partition("+")[0]
    assert code == 0
    assert out == (
        f"replicas: this replica runs Python {here} and torch {torch}, the launcher Python 3.99 and torch 1.0.0.\n"
        "loaded\n"
    )
    assert outcome_of(spec).output_tail == out


def test_a_process_that_is_given_too_little_says_what_is_missing(cloud: Cloud) -> None:
    spec = RunSpec("otter", "file:///nowhere", "00", 1, (0,))
    command = [str(cloud.python), "-P", "-m", "executors.worker"]
    for missing in ("REPLICA_RANK", "REPLICA_TASK_DIGEST"):
        environ = {**cloud.environ(), **replica_environment(spec, 0), "PYTHONPATH": str(ROOT)}
        del environ[missing]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (78, "", 1)
        assert f"{missing} is not set" in done.stderr


def test_a_replicas_environment_has_its_time_limit_and_not_the_users_variables() -> None:
    environ = replica_environment(RunSpec("otter", "s3://bucket/runs", "00", 2, (0, 1), env={"A": "b"}), 1, 60.0)
    assert environ["REPLICA_RENDEZVOUS"] == "s3://bucket/runs"
    assert environ["REPLICA_TIMEOUT_S"] == "60.0"
    assert "A" not in environ
