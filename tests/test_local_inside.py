"""What a local replica finds around it: the environment contract, its launcher's surroundings, seeds and threads."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import local_tasks
import pytest
from runs_of_tests import record_of

from executors import LocalProcessExecutor, attach, current_replica, launch
from executors.errors import ReplicasError
from executors.local_launch import LocalLaunch
from executors.resuming import resume
from executors.task import RunSpec

CONTRACT = ["REPLICA_RANK", "REPLICA_WORLD_SIZE", "REPLICA_RUN_ID", "REPLICA_ATTEMPT", "REPLICA_RENDEZVOUS"]


@pytest.fixture
def with_torch() -> LocalProcessExecutor:
    return LocalProcessExecutor(preload=("torch",), term_grace_s=0.5)


def test_the_environment_contract_is_whole(local: LocalProcessExecutor, tmp_path: Path) -> None:
    rendezvous = str(tmp_path / "a rendezvous, 100%")
    run = launch(local, local_tasks.surroundings, 2, args={"names": CONTRACT}, rendezvous=rendezvous)
    for rank, inside in enumerate(run.results()):
        assert inside["variables"] == {
            "REPLICA_RANK": str(rank),
            "REPLICA_WORLD_SIZE": "2",
            "REPLICA_RUN_ID": run.run_id,
            "REPLICA_ATTEMPT": "0",
            "REPLICA_RENDEZVOUS": Path(rendezvous).as_uri(),
        }


def test_current_replica_tells_the_same_typed(local: LocalProcessExecutor) -> None:
    def entrypoint() -> list[Any]:
        me = current_replica()
        me.store.put_if_absent(f"{me.run_id}/seen/{me.rank}", b"")
        return [me.rank, me.world_size, me.run_id, me.attempt, me.rendezvous, me.nonce]

    run = launch(local, entrypoint, 2)
    for rank, told in enumerate(run.results()):
        claim = record_of(run.handles[rank], "started.json")
        assert told == [rank, 2, run.run_id, 0, run.store.url, claim["nonce"]]
        assert run.store.get(f"{run.run_id}/seen/{rank}", size=0).nbytes == 0


def test_current_replica_outside_of_one_says_what_to_do() -> None:
    with pytest.raises(ReplicasError, match=r"not a replica.*REPLICA_RANK.*replicas launch"):
        current_replica()


def test_leftovers_of_a_torch_process_group_are_removed(
    local: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    for name in names:
        monkeypatch.setenv(name, "7")
    (inside,) = launch(local, local_tasks.surroundings, 1, args={"names": names}).results()
    assert inside["variables"] == dict.fromkeys(names)
    assert os.environ["RANK"] == "7"


def test_a_replica_inherits_the_launcher_as_it_is_at_the_launch(
    local: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launch(local, local_tasks.rank, 1).results()  # the zygote runs by now
    folder = tmp_path / "it's here, ä"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(tmp_path / "on the path"))
    monkeypatch.setenv("NEW", "ä=ö\n'\"")
    monkeypatch.delenv("LANG", raising=False)
    os.environb[b"BYTES"] = b"\xff\xfe"
    try:
        args = {"names": ["NEW", "LANG"]}
        (inside,) = launch(local, local_tasks.surroundings, 1, args=args).results()
        (raw,) = launch(local, lambda: list(os.environb[b"BYTES"]), 1).results()
    finally:
        del os.environb[b"BYTES"]
    assert inside["cwd"] == str(folder)
    assert str(tmp_path / "on the path") in inside["path"]
    assert [path for path in inside["path"] if path in sys.path] == [
        path for path in sys.path if path in inside["path"]
    ]
    assert inside["variables"] == {"NEW": "ä=ö\n'\"", "LANG": None}
    assert raw == [0xFF, 0xFE]


def test_a_relative_sys_path_means_the_launchers_directory(
    local: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "module_in_the_current_directory.py").write_text("def main():\n    return 'found'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert launch(local, "module_in_the_current_directory", 1).results() == ["found"]


def test_a_replica_starts_clean(local: LocalProcessExecutor) -> None:
    secret = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(secret, True)
    try:
        (inside,) = launch(local, local_tasks.surroundings, 1, args={"names": []}).results()
    finally:
        os.close(secret)
    assert inside["stdin"] == ""
    assert inside["session"], "it has a session of its own"
    assert inside["signals"]["SIGINT"].startswith("<built-in function default_int_handler")
    assert "SIG_DFL" in inside["signals"]["SIGCHLD"]
    assert "SIG_DFL" in inside["signals"]["SIGUSR1"]
    described = inside["descriptors"]
    assert described["0"] == os.devnull
    assert described["1"] == described["2"]
    assert described["1"].endswith("output.log")
    others = {n: to for n, to in described.items() if int(n) > 2 and "/proc/" not in to and "pidfd" not in to}
    assert others == {}, "descriptors of the launcher, the zygote or the supervisor"


def test_the_callers_main_is_not_imported(local: LocalProcessExecutor) -> None:
    (inside,) = launch(local, local_tasks.surroundings, 1, args={"names": []}).results()
    assert inside["main"] is None
    assert not {"pytest", "torch", "numpy"} & set(inside["modules"])


def test_environment_of_a_run_reaches_its_replicas_and_no_record(local: LocalProcessExecutor, state_home: Path) -> None:
    args = {"names": ["TOKEN", "PATH"]}
    run = launch(local, local_tasks.surroundings, 1, args=args, env={"TOKEN": "hunter2-very-secret"})
    (inside,) = run.results()
    assert inside["variables"] == {"TOKEN": "hunter2-very-secret", "PATH": os.environ["PATH"]}
    assert run.record.env == ("TOKEN",)
    for file in (path for path in state_home.rglob("*") if path.is_file() and path.name != "outcome.json"):
        assert b"hunter2" not in file.read_bytes(), file


# --- seeds


def test_every_rank_draws_other_random_numbers(with_torch: LocalProcessExecutor) -> None:
    drawn = launch(with_torch, local_tasks.random_numbers, 3).results()
    assert [len(numbers) for numbers in drawn] == [3, 3, 3], "random, numpy and torch"
    assert len({number for numbers in drawn for number in numbers}) == 9


def test_a_seed_repeats_a_run_rank_by_rank(with_torch: LocalProcessExecutor) -> None:
    first, again, other = (launch(with_torch, local_tasks.random_numbers, 2, seed=s).results() for s in (1, 1, 2))
    assert first == again
    assert first[0] != first[1]
    assert first != other


def test_runs_without_a_seed_differ(local: LocalProcessExecutor) -> None:
    first, second = (launch(local, local_tasks.random_numbers, 1).results() for _ in range(2))
    assert first != second


def test_a_seed_of_zero_is_a_seed(local: LocalProcessExecutor) -> None:
    first, second = (launch(local, local_tasks.random_numbers, 1, seed=0).results() for _ in range(2))
    assert first == second


def test_the_launchers_own_random_numbers_are_left_alone(local: LocalProcessExecutor) -> None:
    random.seed(5)
    expected = [random.random() for _ in range(2)]
    random.seed(5)
    drawn = [random.random()]
    launch(local, local_tasks.random_numbers, 1, seed=1).results()
    assert [*drawn, random.random()] == expected


# --- threads


def test_torch_threads_are_shared_out_over_the_replicas_that_run(
    with_torch: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = local_tasks.cores()
    for n in (1, 2, cores + 1):
        inside = launch(with_torch, local_tasks.threads, n).results()
        assert [row["torch"] for row in inside] == [max(1, cores // n)] * n


def test_waiting_replicas_do_not_count_for_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    one_at_a_time = LocalProcessExecutor(preload=("torch",), max_parallel=1)
    inside = launch(one_at_a_time, local_tasks.threads, 2).results()
    assert [row["torch"] for row in inside] == [local_tasks.cores()] * 2


def fail_first() -> dict[str, Any]:
    """Return the threads of this replica; in its first attempt rank 1 says them and fails."""
    inside = local_tasks.threads()
    if (current_replica().rank, current_replica().attempt) == (1, 0):
        raise RuntimeError(f"threads: {inside}")
    return inside


def test_a_resumed_replica_has_the_threads_of_its_first_attempt(
    with_torch: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run = launch(with_torch, fail_first, 2)
    assert run.wait(60)
    each = max(1, local_tasks.cores() // 2)
    first = {"torch": each, "omp": str(each)}
    assert f"threads: {first}" in (run.outcomes()[1].error or "")
    assert resume(run).results() == [first, first]


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_run_that_is_resumed_has_the_parallelism_of_its_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """This machine has noted it; another one takes it from the record."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    one_at_a_time = LocalProcessExecutor(preload=(), max_parallel=1, term_grace_s=0.5)
    run = launch(one_at_a_time, fail_first, 2, rendezvous=tmp_path / "shared")
    assert run.wait(60)
    digest = run.task_digest
    if where == "elsewhere":
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    assert resume(attach(run.url), task_digest=digest).results()[1]["torch"] == local_tasks.cores()


@pytest.mark.parametrize(
    ("world_size", "max_parallel", "threads"), [(1, None, 8), (4, None, 2), (4, 2, 4), (2, 6, 4), (16, None, 1)]
)
@pytest.mark.parametrize("n_launched", [1, 4])
def test_the_cores_are_shared_by_all_that_run_at_once_however_many_are_launched_now(
    world_size: int, max_parallel: int | None, threads: int, n_launched: int
) -> None:
    ranks = tuple(range(world_size))[:n_launched]
    spec = RunSpec("r", "file:///nowhere", "", world_size=world_size, ranks=ranks)
    launch = LocalLaunch(spec, "", "", [], {}, max_parallel=max_parallel)
    assert launch.torch_threads(cores=8) == threads


def test_the_users_own_number_of_threads_wins(
    with_torch: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    (inside,) = launch(with_torch, local_tasks.threads, 1).results()
    assert inside == {"torch": 3, "omp": "3"}
    (inside,) = launch(with_torch, local_tasks.threads, 1, env={"OMP_NUM_THREADS": "1"}).results()
    assert inside == {"torch": 1, "omp": "1"}


# --- progress and artifacts


def test_progress_and_artifacts_reach_the_launcher(local: LocalProcessExecutor, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"\0\1" * 100_000)
    run = launch(local, local_tasks.report_and_keep, 2, args={"path": str(tmp_path / "weights")})
    assert run.results() == [run.run_id] * 2
    for rank, replica in enumerate(run.status().replicas):
        assert replica.reported == {"step": 7, "loss": 0.25, "tokens": 1e6}
        (artifact,) = run.artifacts(rank)
        assert (artifact.name, artifact.size_bytes) == ("model/weights.bin", 200_000)
        artifact.save(tmp_path / f"back/{rank}/weights")
        assert (tmp_path / f"back/{rank}/weights").read_bytes() == b"\0\1" * 100_000
