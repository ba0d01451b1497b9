"""Tests the environment of a local replica: variables, surroundings of the launcher, seeds and threads."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from support import tasks
from support.new_runs import run_spec
from support.runs import record_of

from executors import LocalProcessExecutor, attach, current_replica, launch
from executors.backends.local.request import LocalLaunch
from executors.run.resume import resume
from executors.run.run import view_of

CONTRACT = ["REPLICA_RANK", "REPLICA_WORLD_SIZE", "REPLICA_RUN_ID", "REPLICA_ATTEMPT", "REPLICA_RENDEZVOUS"]
OF_A_PROCESS_GROUP = [
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_NTASKS", "SLURM_PROCID", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
]


@pytest.fixture
def with_torch() -> LocalProcessExecutor:
    return LocalProcessExecutor(term_grace_s=0.5)


def test_the_environment_has_the_contract_the_runs_own_values_and_no_process_group(
    local: LocalProcessExecutor, tmp_path: Path, state_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in OF_A_PROCESS_GROUP:
        monkeypatch.setenv(name, "7")
    rendezvous = tmp_path / "a rendezvous, 100%"
    args = {"names": [*CONTRACT, *OF_A_PROCESS_GROUP, "TOKEN", "PATH", "FILE", "OF_${rank}"]}
    env = {"TOKEN": "hunter2-very-secret", "FILE": "${rank} of ${world_size}, $$5, $HOME"}
    monkeypatch.setenv("OF_1", "${rank}")
    run = launch(local, tasks.surroundings, 2, args=args, rendezvous=str(rendezvous), env=env)
    for rank, inside in enumerate(run.results()):
        contract = [str(rank), "2", run.run_id, "0", rendezvous.as_uri()]
        assert inside["variables"] == {
            **dict(zip(CONTRACT, contract, strict=True)),
            **dict.fromkeys(OF_A_PROCESS_GROUP),
            "TOKEN": "hunter2-very-secret",
            "PATH": os.environ["PATH"],
            "FILE": f"{rank} of 2, $$5, $HOME",
            f"OF_{rank}": "${rank}" if rank == 1 else None,
        }
    assert os.environ["RANK"] == "7"
    assert view_of(run).record.placements[0].env == ("FILE", "TOKEN")
    for file in (path for path in tmp_path.rglob("*") if path.is_file() and path.name != "outcome.json"):
        assert b"hunter2" not in file.read_bytes(), f"{file}: values are never recorded"


def test_current_replica_has_the_same_typed(local: LocalProcessExecutor) -> None:
    def entrypoint() -> list[Any]:
        me = current_replica()
        me.store.put_if_absent(f"{me.run_id}/seen/{me.rank}", b"")
        return [me.rank, me.world_size, me.run_id, me.attempt, me.rendezvous, me.nonce]

    run = launch(local, entrypoint, 2)
    for rank, found in enumerate(run.results()):
        claim = record_of(run.handles[rank], "started.json")
        assert found == [rank, 2, run.run_id, 0, view_of(run).store.url, claim["nonce"]]
        assert view_of(run).store.get(f"{run.run_id}/seen/{rank}", size=0).nbytes == 0


def test_a_replica_inherits_the_launcher_as_it_is_at_the_launch(
    local: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launch(local, tasks.rank, 1).results()  # the zygote is running now
    folder = tmp_path / "it's here, ä"
    folder.mkdir()
    (folder / "module_in_the_current_directory.py").write_text("def main():\n    return 'found'\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "on the path"), "", *sys.path])
    monkeypatch.setenv("NEW", "ä=ö\n'\"")
    monkeypatch.delenv("LANG", raising=False)
    os.environb[b"BYTES"] = b"\xff\xfe"
    try:
        (inside,) = launch(local, tasks.surroundings, 1, args={"names": ["NEW", "LANG"]}).results()
        (raw,) = launch(local, lambda: list(os.environb[b"BYTES"]), 1).results()
    finally:
        del os.environb[b"BYTES"]
    assert inside["cwd"] == str(folder)
    assert inside["path"][0] == str(tmp_path / "on the path")
    inherited = [path for path in inside["path"] if path in sys.path]
    assert inherited == [path for path in sys.path if path in inside["path"]], (
        "the paths of the launcher keep their order"
    )
    assert inside["variables"] == {"NEW": "ä=ö\n'\"", "LANG": None}
    assert raw == [0xFF, 0xFE]
    assert launch(local, "module_in_the_current_directory", 1).results() == ["found"], (
        "a module in a relative folder of sys.path is found"
    )


def test_a_replica_starts_clean(local: LocalProcessExecutor) -> None:
    secret = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(secret, True)
    try:
        (inside,) = launch(local, tasks.surroundings, 1, args={"names": []}).results()
    finally:
        os.close(secret)
    assert inside["stdin"] == ""
    assert inside["session"], "the replica has its own session"
    assert inside["signals"]["SIGINT"].startswith("<built-in function default_int_handler")
    assert "SIG_DFL" in inside["signals"]["SIGCHLD"]
    assert "SIG_DFL" in inside["signals"]["SIGUSR1"]
    described = inside["descriptors"]
    assert described["0"] == os.devnull
    assert described["1"] == described["2"]
    assert described["1"].endswith("output.log")
    others = {
        n: to
        for n, to in described.items()
        if int(n) > 2 and not any(ours in to for ours in ("/proc/", "pidfd", "replicas-stacks"))
    }
    reserved = [others.pop(number) for number in sorted(others) if others[number] == os.devnull]
    assert len(reserved) == 4, "the replica has only the four descriptors in reserve for its outcome"
    assert others == {}, "descriptors of the launcher, the zygote or the supervisor"
    assert inside["main"] is None, "the caller's main is not imported"
    assert not {"pytest", "torch", "numpy"} & set(inside["modules"])


# --- seeds


def test_every_rank_draws_its_own_random_numbers_and_a_seed_repeats_them(with_torch: LocalProcessExecutor) -> None:
    seeds = (1, 1, 2, 0, 0, None, None)
    first, again, other, zero, zero_again, some, more = (
        launch(with_torch, tasks.random_numbers, 2, seed=seed).results() for seed in seeds
    )
    assert [len(numbers) for numbers in first] == [3, 3], "random, numpy and torch"
    assert (first, zero) == (again, zero_again)
    distinct = [number for run in (first, other, zero, some, more) for rank in run for number in rank]
    assert len(set(distinct)) == len(distinct)


def test_the_launchers_own_random_numbers_are_left_alone(local: LocalProcessExecutor) -> None:
    random.seed(5)
    expected = [random.random() for _ in range(2)]
    random.seed(5)
    drawn = [random.random()]
    launch(local, tasks.random_numbers, 1, seed=1).results()
    assert [*drawn, random.random()] == expected


# --- threads


def test_the_cores_are_shared_by_all_that_run_at_once_however_many_are_launched_now() -> None:
    for world_size, max_parallel, threads in [(1, None, 8), (4, None, 2), (4, 2, 4), (2, 6, 4), (16, None, 1)]:
        for n_launched in (1, 4):
            ranks = tuple(range(world_size))[:n_launched]
            spec = run_spec("r", "file:///nowhere", "", world_size=world_size, ranks=ranks)
            launch = LocalLaunch(spec, "", "", [], {}, max_parallel=max_parallel)
            assert launch.torch_threads(cores=8) == threads, (world_size, max_parallel, n_launched)


def test_torch_threads_are_shared_out_unless_the_user_sets_them(
    with_torch: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = tasks.cores()
    for n in (1, 2, cores + 1):
        inside = launch(with_torch, tasks.threads, n).results()
        assert [row["torch"] for row in inside] == [max(1, cores // n)] * n
    one_at_a_time = LocalProcessExecutor(max_parallel=1)
    inside = launch(one_at_a_time, tasks.threads, 2).results()
    assert [row["torch"] for row in inside] == [cores] * 2, "ranks that wait for a place do not share the cores"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launch(with_torch, tasks.threads, 1).results() == [{"torch": 3, "omp": "3"}]
    ones = launch(with_torch, tasks.threads, 1, env={"OMP_NUM_THREADS": "1"}).results()
    assert ones == [{"torch": 1, "omp": "1"}]


def fail_first() -> dict[str, Any]:
    """Return the number of threads of this replica. The first attempt of rank 1 prints it and fails."""
    # Importing torch where it is not preloaded takes most of a minute on a busy machine, in each of four processes.
    inside = tasks.threads() if "torch" in sys.modules else {"omp": os.environ.get("OMP_NUM_THREADS")}
    if (current_replica().rank, current_replica().attempt) == (1, 0):
        raise RuntimeError(f"threads: {inside}")
    return inside


def test_a_resumed_replica_has_the_threads_of_its_first_attempt(
    with_torch: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run = launch(with_torch, fail_first, 2)
    assert run.wait(60)
    each = max(1, tasks.cores() // 2)
    first = {"torch": each, "omp": str(each)}
    assert f"threads: {first}" in (run.outcomes()[1].error or "")
    assert resume(run).results() == [first, first]


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_run_that_is_resumed_has_the_parallelism_of_its_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """This machine has recorded it, and another machine takes it from the run's record."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    one_at_a_time = LocalProcessExecutor(preload=(), max_parallel=1, term_grace_s=0.5)
    run = launch(one_at_a_time, fail_first, 2, rendezvous=tmp_path / "shared")
    assert run.wait(60)
    digest = view_of(run).task_digest
    if where == "elsewhere":
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    assert resume(attach(run.url), task_digest=digest).results()[1]["omp"] == str(tasks.cores())


# --- progress and artifacts


def test_progress_and_artifacts_reach_the_launcher(local: LocalProcessExecutor, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"\0\1" * 100_000)
    run = launch(local, tasks.report_and_keep, 2, args={"path": str(tmp_path / "weights")})
    assert run.results() == [run.run_id] * 2
    for rank, replica in enumerate(run.status().replicas):
        assert replica.reported == {"step": 7, "loss": 0.25, "tokens": 1e6}
        (artifact,) = run.artifacts(rank)
        assert (artifact.name, artifact.size_bytes) == ("model/weights.bin", 200_000)
        artifact.save(tmp_path / f"back/{rank}/weights")
        assert (tmp_path / f"back/{rank}/weights").read_bytes() == b"\0\1" * 100_000


def test_artifacts_of_earlier_attempts_are_collected_and_of_each_name_the_newest_one(
    local: LocalProcessExecutor, tmp_path: Path
) -> None:
    def keep(folder: str) -> None:
        me = current_replica()
        file = Path(folder, "weights")
        file.write_text(f"of attempt {me.attempt}")
        for name in ("last.pt", f"epoch/{me.attempt}.pt"):
            me.save_artifact(name, file)
        if me.attempt == 0:
            raise ValueError("boom")

    run = launch(local, keep, 1, args={"folder": str(tmp_path)}, restarts=1)
    assert run.wait(60)
    kept = {artifact.name: bytes(artifact.read()).decode() for artifact in run.artifacts(0)}
    assert kept == {"epoch/0.pt": "of attempt 0", "epoch/1.pt": "of attempt 1", "last.pt": "of attempt 1"}
