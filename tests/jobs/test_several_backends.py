"""Tests one run on several backends: launched on all of them, or with replicas that a user adds later."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.cli import Folder
from support.fake_jobs import FakeExecutor, Machines

from executors import LocalProcessExecutor, Run, attach, launch
from executors.cli.launch import report_unreadable_run
from executors.cli.options import options_of
from executors.cli.output import Output, UsageProblem
from executors.errors import BackendError, LaunchError, RunNotFoundError, StoreError, UntrustedTaskError
from executors.launcher.launch_plan import plan_launch
from executors.launcher.launch_settings import keys_of_launch, read_settings
from executors.launcher.several_backends import executor_of, options_by_part, parse_backends, total_replicas
from executors.protocol import ServerlessExecutor
from executors.registry import get_executor
from executors.restarts.decision_log import DecisionLog
from executors.restarts.lease import release_lease
from executors.run.resume import resume
from executors.run.run import view_of
from executors.store.added_ranks import added_key
from executors.store.records import exists, to_bytes
from executors.task.launch_request import LaunchRequest
from executors.testing import eventually
from executors.view.run_logs import EVERYTHING, logs_by_rank

MAIN = """
import os, time
from pathlib import Path
from executors import current_replica

def main(folder):
    replica = current_replica()
    print(f"rank {replica.rank} of {replica.world_size} waits", flush=True)
    replica.report(step=replica.attempt)
    Path(folder, f"{replica.rank}-{replica.attempt}").write_text(str(os.getpid()))
    while not Path(folder, "go").exists():
        time.sleep(0.02)
    return [replica.rank, replica.attempt]
"""
FAKE = "support.fake_jobs:FakeExecutor"
LOCAL = {"preload": (), "term_grace_s": 0.5}


@pytest.fixture
def folder(machines: Machines, tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "said"
    made.mkdir()
    Path("job.py").write_text(MAIN)
    yield made
    (made / "go").touch()


def made(name: str) -> ServerlessExecutor:
    return get_executor(name, LOCAL if name == "local" else {})


def launched(folder: Path, backend: str, **more: Any) -> Run:
    n = total_replicas(backend, None) or 1
    more = {"run_id": "otter", "args": {"folder": str(folder)}, **more}
    run = launch(executor_of(backend, made), "job.py:main", n, **more)
    eventually(lambda: len(list(folder.iterdir())) == n, "all replicas wait")
    return run


def come(folder: Path, *names: str) -> None:
    eventually(lambda: all((folder / name).exists() for name in names), f"{names} wait", within_s=60)


def states(run: Run) -> list[tuple[int, str, str]]:
    return [(each.rank, each.backend, str(each.status)) for each in run.status().replicas]


def test_a_launch_on_two_backends_is_one_run_of_all(folder: Path) -> None:
    run = launched(folder, f"local:1,{FAKE}:2", detach=True)
    assert view_of(run).backend == run.status().backend == "local:1,fake:2"
    seen = attach("otter", executor=FakeExecutor())
    assert states(seen) == [(0, "local", "running"), (1, "fake", "running"), (2, "fake", "running")]
    assert "backend" in seen.status().used_columns()
    assert [part.backend for part in view_of(seen).record.placements] == ["local", "fake"]
    lines = "".join(f"[{rank}] rank {rank} of 3 waits\n" for rank in range(3))
    assert seen.logs() == lines
    seen.cancel(2)
    eventually(lambda: states(seen)[2][2] == "cancelled", "rank 2 has ended")
    resume(run, ranks=[2], detach=True)
    come(folder, "2-1")
    (folder / "go").touch()
    assert attach("otter", executor=FakeExecutor()).results() == [[0, 0], [1, 0], [2, 1]]


class InstallingExecutor(FakeExecutor):
    backend_name = "installing"

    def __init__(self, pip: Sequence[str] = ("einops",)) -> None:
        super().__init__()
        self.service.pip = pip


def test_requirements_of_one_backend_are_not_installed_at_another(folder: Path, machines: Machines) -> None:
    of_both = executor_of(
        f"{FAKE}:1,{__name__}:InstallingExecutor:1", lambda name: made(name) if name == FAKE else InstallingExecutor()
    )
    with pytest.raises(ValueError, match=r"'installing' installs 'einops', and 'fake' does not.* Give both the same"):
        launch(of_both, "job.py:main", 2, run_id="otter", args={"folder": str(folder)})
    with pytest.raises(RunNotFoundError):
        attach("otter")
    assert not machines.jobs
    asked = LaunchRequest.of("job.py:main", n=2, args={"folder": str(folder)})
    with_this_machine = executor_of(
        "local:1,other:1", lambda name: made(name) if name == "local" else InstallingExecutor()
    )
    package = plan_launch(asked, with_this_machine).package
    assert package is not None
    assert "einops" in package.requirements, "the local backend may lack the requirement, because it installs nothing"


@pytest.mark.usefixtures("quick_tries")
@pytest.mark.parametrize("min_replicas", [None, 1])
def test_a_refusal_by_one_backend_ends_the_others_unless_fewer_replicas_are_enough(
    machines: Machines, folder: Path, capsys: pytest.CaptureFixture[str], min_replicas: int | None
) -> None:
    machines.fail("start", "rejected", times=None)
    backend = f"{FAKE}:2,local:1"
    asked: Any = {"run_id": "otter", "args": {"folder": str(folder)}, "min_replicas": min_replicas}
    if min_replicas is None:
        with pytest.raises(LaunchError, match=r"Fake: rejected, as the test asked.*at other backends were ended, too"):
            launch(executor_of(backend, made), "job.py:main", 3, **asked)
        run = attach("otter", executor=FakeExecutor())
        assert run.status().is_terminal
        *refused, ended = [str(outcome.status) for outcome in run.outcomes()]
        assert ("failed" in refused, ended) == (True, "cancelled")
    else:
        run = launch(executor_of(backend, made), "job.py:main", 3, **asked)
        assert "started with 1 of 3 replicas" in capsys.readouterr().err
        (folder / "go").touch()
        assert run.results() == [None, None, [2, 0]]


def test_equal_failures_on_one_backend_do_not_stop_ranks_on_another_one(machines: Machines, folder: Path) -> None:
    first_line = "\n    assert current_replica().rank > 1, 'no flash_attn here'"
    Path("job.py").write_text(MAIN.replace("def main(folder):", f"def main(folder):{first_line}"))
    machines.is_held = True
    asked: Any = {"run_id": "otter", "args": {"folder": str(folder)}, "restarts": "3,backoff=0s", "detach": True}
    run = launch(executor_of(f"local:2,{FAKE}:2", made), "job.py:main", 4, **asked)
    log = DecisionLog(view_of(run).store, "otter")
    eventually(
        lambda: [entry.kind for entry in log.read()].count("give_up") == 2,
        "both ranks of this backend are given up",
        within_s=60,
    )
    machines.release()
    (folder / "go").touch()
    assert run.wait(60)
    assert [outcome.result for outcome in run.outcomes()] == [None, None, [2, 0], [3, 0]]


def test_replicas_are_added_by_another_executor_and_count_like_the_others(machines: Machines, folder: Path) -> None:
    run = launched(folder, "local:1", restarts="2", detach=True)
    assert not list(view_of(run).store.list("otter/task-")), (
        "the launch of a local run has stored no code for other machines"
    )
    assert run.add(FakeExecutor(), 2) == [1, 2]
    come(folder, "1-0", "2-0")
    assert states(run) == [(0, "local", "running"), (1, "fake", "running"), (2, "fake", "running")]
    waiting = threading.Thread(target=run.wait, args=(120,))
    waiting.start()
    machines.end(machines.job_of(run, 2))
    come(folder, "2-1")  # the process that added the rank restarts it
    (folder / "go").touch()
    waiting.join()
    assert run.results() == [[0, 0], [1, 0], [2, 1]]
    assert [outcome.rank for outcome in run.outcomes()] == [0, 1, 2]
    with pytest.raises(ValueError, match=r"Run 'otter' has ended .*, so no replica can join it"):
        run.add(FakeExecutor(), 1)


def test_an_addition_to_a_released_run_is_reported_to_continue(
    machines: Machines, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The containers of the addition read the run's lease, which no process must renew after the release."""
    run = launched(folder, f"{FAKE}:1")
    note = "Run 'otter' continues on its own, and the added replicas do, too, to their time limit"
    found = attach("otter", executor=FakeExecutor())
    assert found.add(FakeExecutor(), 1) == [1]
    assert note not in capsys.readouterr().err, "no note is printed, because the launcher renews the lease"
    report_unreadable_run(found, Output(), StoreError("gone"), FakeExecutor(), who="The added replicas")
    told = (
        "The added replicas continue while the store does not answer, and 15 min longer. End it: replicas cancel otter"
    )
    assert told in capsys.readouterr().out
    release_lease(view_of(run).store, "otter")
    found = attach("otter", executor=FakeExecutor())
    assert found.add(FakeExecutor(), 2) == [2, 3]
    assert f"{note}. End it: replicas cancel otter --rank 2-3\n" in capsys.readouterr().err
    report_unreadable_run(found, Output(), StoreError("gone"), FakeExecutor(), who="The added replicas")
    assert "The added replicas continue. To see the end: replicas wait otter" in capsys.readouterr().out
    (folder / "go").touch()
    assert run.wait(60)


def test_another_machine_adds_with_the_digest_and_restarts_the_ranks_that_the_user_names(
    machines: Machines,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = launched(folder, "local:1", rendezvous=str(tmp_path / "shared"), detach=True, env={"WORD": "x"})
    digest = view_of(run).task_digest
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    there = attach(run.url)
    with pytest.raises(UntrustedTaskError):
        there.add(FakeExecutor(), 1)
    with pytest.raises(ValueError, match="the variable 'WORD', whose value is not recorded"):
        there.add(FakeExecutor(), 1, task_digest=digest)
    assert not exists(view_of(run).store, added_key("otter", 0))
    assert there.add(FakeExecutor(), 1, task_digest=digest, env={"WORD": "y"}, detach=True) == [1]
    come(folder, "1-0")
    there.cancel(0)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "third"))
    backend_unknown_here = attach(run.url)
    assert states(backend_unknown_here)[1] == (1, "fake", "running")
    assert "no installed package registers" in backend_unknown_here.status().replicas[1].note
    third = attach(run.url, executor=FakeExecutor())
    machines.end(machines.job_of(third, 1))
    eventually(lambda: third.status().is_terminal, "both ranks have ended")
    known: Any = {"task_digest": digest, "env": {"WORD": "z"}, "detach": True}
    resume(third, **known)
    assert "rank 1 on fake was added by another machine" in capsys.readouterr().err
    come(folder, "0-1")
    forged = added_key("otter", 1)
    view_of(run).store.put(forged, bytes(view_of(run).store.get(added_key("otter", 0))).replace(b"[1]", b"[7]"))
    view_of(third).placements.read_added()
    assert (
        view_of(there).placements.may_start(1),
        view_of(third).placements.may_start(1),
        view_of(third).placements.may_start(7),
    ) == (
        True,
        False,
        False,
    )
    view_of(run).store.delete(forged)
    with pytest.raises(UntrustedTaskError, match="came with code of its own"):
        resume(attach(run.url, executor=FakeExecutor()), ranks=[1], **known)
    trusting = {**known, "task_digest": None, "trust_bucket": True}
    resume(attach(run.url, executor=FakeExecutor()), ranks=[1], **trusting)
    come(folder, "1-1")
    (folder / "go").touch()
    assert attach(run.url, executor=FakeExecutor()).results() == [[0, 1], [1, 1]]


def test_logs_of_an_added_rank_come_from_its_own_backend_at_the_first_question(
    machines: Machines, folder: Path
) -> None:
    run = launched(folder, f"{FAKE}:1", detach=True)
    assert run.add(made("local"), 1, detach=True) == [1]
    come(folder, "1-0")
    lines = [f"rank {rank} of 1 waits\n" for rank in range(2)]

    def fresh() -> Run:
        return attach("otter", executor=FakeExecutor())

    assert fresh().logs() == f"[0] {lines[0]}[1] {lines[1]}"
    assert fresh().logs(1) == lines[1]
    assert logs_by_rank(view_of(fresh()), [1], 20, None, EVERYTHING, print) == {1: lines[1]}
    (folder / "go").touch()
    assert run.wait(60)


def test_a_follower_that_began_before_an_addition_reads_it_at_its_backend(machines: Machines, folder: Path) -> None:
    run = launched(folder, f"{FAKE}:1", detach=True)
    followed = attach("otter", executor=FakeExecutor()).logs(follow=True)
    assert next(followed) == "[0] rank 0 of 1 waits\n"
    assert run.add(made("local"), 1, detach=True) == [1]
    come(folder, "1-0")
    assert next(followed) == "[1] rank 1 of 1 waits\n"
    (folder / "go").touch()
    assert run.wait(60)


def test_a_process_that_adds_at_the_same_time_gets_other_ranks_and_a_record_of_a_hostile_user_adds_none(
    folder: Path,
) -> None:
    run = launched(folder, "local:1", detach=True)
    view_of(run).store.put(added_key("otter", 0), b"{" * 5)
    hostile = {"backend": "os:system", "ranks": [0], "nonce": "x"}
    view_of(run).store.put(added_key("otter", 1), to_bytes(hostile))
    view_of(run).store.put(added_key("otter", 2), to_bytes({**hostile, "backend": "modal"}))
    local = LocalProcessExecutor(preload=(), term_grace_s=0.5)
    runs = [attach("otter") for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        ranks = list(pool.map(lambda each: each.add(local, 1, detach=True), runs))
    assert sorted(ranks) == [[1], [2], [3]]
    (folder / "go").touch()
    assert run.results() == [[rank, 0] for rank in range(4)]


def test_a_run_in_a_directory_takes_nothing_from_where_no_one_sees_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = launched(folder, "local:1", detach=True)
    monkeypatch.setattr(FakeExecutor, "needs_shared_rendezvous", True)
    with pytest.raises(BackendError, match="a directory that replicas on 'fake' do not see"):
        run.add(FakeExecutor(), 1)
    with pytest.raises(BackendError, match="Backend 'inline' starts all ranks or none"):
        run.add("inline", 1)
    with pytest.raises(BackendError, match="needs a rendezvous that both sides reach"):
        launch(executor_of(f"local:1,{FAKE}:1", made), "job.py:main", 2, args={"folder": str(folder)})
    assert not exists(view_of(run).store, added_key("otter", 0))
    (folder / "go").touch()
    assert run.wait(60)


@pytest.mark.filterwarnings("ignore:gpu='H100':RuntimeWarning")  # this machine has none
def test_the_command_adds_replicas_and_leaves_the_others_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, local = Folder(Path.cwd()), ("--option", "preload=[]")
    Path("job.py").write_text(MAIN)
    monkeypatch.setenv("S", "a secret")
    run = launched(folder, "local:1", detach=True, gpu="H100", secrets=["S"])
    added = here.replicas("add", "otter", "--n", 1, "--detach", *local)
    assert (added.code, added.stdout) == (0, "Added rank 1 on local.\n"), added
    come(folder, "1-0")
    none = here.replicas("add", "otter", "--n", 1, "--detach", *local, "--gpu", "", "--secret", "")
    assert (none.code, none.stdout) == (0, "Added rank 2 on local.\n"), none
    assert run.ranks == [0, 1, 2]
    terms = [(each.placement.gpu, each.placement.secrets) for each in view_of(run).placements.placed]
    assert terms == [("H100", ("S",)), ("H100", ("S",)), (None, ())]
    come(folder, "2-0")
    assert here.replicas("add", "otter", "--n", 1, "-b", "nowhere").stderr.startswith("Error: No backend named 'now")
    (folder / "go").touch()
    done = here.replicas("wait", "otter", "--json")
    assert (done.code, [row["result"] for row in done.json["replicas"]]) == (0, [[0, 0], [1, 0], [2, 0]])


def test_replicas_that_would_get_the_code_of_another_folder_are_not_added(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here, there = Path.cwd(), tmp_path / "there"
    run = launched(folder, "local:1", detach=True)
    there.mkdir()
    (there / "job.py").write_text(MAIN)
    monkeypatch.chdir(there)
    for executor in (made("local"), FakeExecutor()):
        with pytest.raises(ValueError, match=f"cd {here} && replicas add --n 2 otter"):
            run.add(executor, 2)
    assert run.ranks == [0]
    shipped = launched(folder, f"{FAKE}:1", run_id="badger", detach=True)
    monkeypatch.chdir(here)
    assert shipped.add(FakeExecutor(), 1) == [1]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("local", {}),
        ("pkg.mod:Class", {}),
        ("local:2", {"local": 2}),
        ("slurm:4, modal:4", {"slurm": 4, "modal": 4}),
        (f"local:1,{FAKE}:2", {"local": 1, FAKE: 2}),
        ("slurm:4,modal", None),
        ("slurm:4,slurm:2", None),
        ("slurm:4,modal:0", None),
    ],
)
def test_several_backends_are_named_with_their_numbers(text: str, parts: dict[str, int] | None) -> None:
    if parts is None:
        with pytest.raises(ValueError, match="must name each of several backends once, with its number of replicas"):
            parse_backends(text)
        return
    assert parse_backends(text) == parts
    assert total_replicas(text, None) == (sum(parts.values()) or None)
    assert total_replicas(text, 7 if not parts else None) == (sum(parts.values()) or 7)


def test_one_backend_with_its_number_is_that_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options_of("modal:4", None, ["corpus:/data"]) == {"volumes": {"/data": "corpus"}}
    with pytest.raises(UsageProblem, match="Backend 'local' has no volumes"):
        options_of("local:4", None, ["corpus:/data"])
    monkeypatch.setenv("REPLICAS_RENDEZVOUS", "s3://bucket/runs")  # that of replicas elsewhere
    for backend, rendezvous in (("local", None), ("local:2", None), ("modal:2", "s3://bucket/runs")):
        assert read_settings(keys_of_launch(), backend=backend).values.get("rendezvous") == rendezvous, backend


def test_an_option_names_its_backend() -> None:
    assert options_by_part("local", {"a": 1}) == {"local": {"a": 1}}
    assert options_by_part("slurm:1,modal:1", {"slurm.partition": "gpu"}) == {
        "slurm": {"partition": "gpu"},
        "modal": {},
    }
    for option in ("partition", "ray.cpus"):
        with pytest.raises(ValueError, match=r"write slurm\..* or modal\."):
            options_by_part("slurm:1,modal:1", {option: 1})
    with pytest.raises(ValueError, match="has 2 replicas, got n=3"):
        total_replicas("slurm:1,modal:1", 3)
