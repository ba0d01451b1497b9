"""What a replica is started with is what its launch or its addition was given, whoever starts it, and wherever."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.fake_jobs import FakeExecutor, FakeJobs, Machines

from executors import LocalProcessExecutor, Run, attach, launch
from executors.attempt import Attempt
from executors.backends.jobs.executor import JobExecutor
from executors.cli.options import find_run
from executors.cli.output import UsageProblem
from executors.errors import BackendError, LaunchError, UntrustedTaskError
from executors.launcher.parts import executor_of
from executors.registry import BUILT_IN
from executors.replica import LEASE_S
from executors.run import run_index
from executors.run.recipe import recipes_of, vouched_task
from executors.run.resume import resume
from executors.run.run_index import Note, noted_at_launch, noted_options, remember, remember_added
from executors.store.added_ranks import added_key
from executors.store.records import exists, to_bytes
from executors.supervision.decisions import DecisionLog
from executors.task.added import Added, take_ranks
from executors.testing import eventually

MAIN = """
import os, time
from pathlib import Path
from executors import current_replica

def main(folder):
    replica = current_replica()
    said = " ".join(os.environ.get(name, "-") for name in ("WORD", "MORE")) + os.environ.get("LAST", "")
    Path(folder, f".{replica.rank}-{replica.attempt}").write_text(said)
    Path(folder, f".{replica.rank}-{replica.attempt}").rename(Path(folder, f"{replica.rank}-{replica.attempt}"))
    while not Path(folder, "go").exists():
        time.sleep(0.02)
    return [replica.rank, replica.attempt]
"""


@pytest.fixture
def folder(machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setitem(BUILT_IN, "fake", f"{__name__}:AnyFakeExecutor")
    monkeypatch.setitem(BUILT_IN, "other", f"{__name__}:OtherFakeExecutor")
    monkeypatch.setattr("executors.run.launch_hands.AGAIN_S", 0.1)
    made = tmp_path / "said"
    made.mkdir()
    Path("job.py").write_text(MAIN)
    yield made
    (made / "go").touch()


class AnyFakeExecutor(FakeExecutor):
    """One whose service is one of several accounts, and knows any secret."""

    accounts: ClassVar[dict[str, Machines]] = {}

    def __init__(self, account: str = "") -> None:
        machines = self.accounts[account] if account else self.machines
        JobExecutor.__init__(self, AnyFakeJobs(machines, account))


class OtherFakeExecutor(AnyFakeExecutor):
    backend_name = "other"


class AnyFakeJobs(FakeJobs):
    def __init__(self, machines: Machines, account: str) -> None:
        super().__init__(machines)
        self.account = account

    @property
    def options(self) -> dict[str, Any]:
        return {"account": self.account}

    def check_account(self, gpu: str | None, timeout_s: float | None, secret_names: Sequence[str]) -> None:
        if "NOT_THERE" in secret_names:
            raise BackendError("Fake has no secret 'NOT_THERE'.")


def local() -> LocalProcessExecutor:
    return LocalProcessExecutor(preload=(), term_grace_s=0.5)


def installing(*pip: str) -> AnyFakeExecutor:
    made = AnyFakeExecutor()
    made.service.pip = pip
    return made


def launched(folder: Path, executor: Any, **more: Any) -> Run:
    run = launch(executor, "job.py:main", 1, **{"run_id": "otter", "args": {"folder": str(folder)}, **more})
    come(folder, "0-0")
    return run


def come(folder: Path, *names: str) -> None:
    eventually(lambda: all((folder / name).exists() for name in names), f"{names} wait", within_s=60)


def is_kept(run: Run) -> threading.Thread:
    thread = threading.Thread(target=run.wait, args=(60,), daemon=True)
    thread.start()
    return thread


def test_two_additions_at_once_are_both_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    where, names = "s3://bucket/runs", ["added:0", "added:1"]
    remember("otter", where, "0" * 64, {"a": 1}, ["token"])
    find_note, both_read = run_index._find_note, threading.Barrier(2)

    def slowly(run_id: str) -> Note | None:
        note = find_note(run_id)
        with contextlib.suppress(threading.BrokenBarrierError):  # one at a time, as is right
            both_read.wait(0.2)
        return note

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(run_index, "locate", lambda run_id: where)
        patch.setattr(run_index, "_find_note", slowly)
        list(pool.map(lambda name: remember_added("otter", where, name, {"n": name}), names))
    assert [noted_options("otter", where, name) for name in names] == [{"n": name} for name in names]
    launched = noted_at_launch("otter", where)
    assert launched is not None
    assert (launched.task_digest, launched.executor_options, launched.secrets) == ("0" * 64, {"a": 1}, ("token",))


def test_who_launched_does_not_start_what_another_process_added(machines: Machines, folder: Path) -> None:
    run = launched(folder, AnyFakeExecutor(), restarts="3,backoff=0s", timeout=500, env={"WORD": "launch"})
    there = attach("otter", executor=AnyFakeExecutor())
    assert there.add(AnyFakeExecutor(), 1, timeout=50, env={"WORD": "added", "MORE": "yes"}) == [1]
    come(folder, "1-0")
    machines.end(machines.job_of(there, 1), "preempted")
    machines.end(machines.job_of(run, 0), "preempted")
    waiting = is_kept(run)
    come(folder, "0-1")
    assert (folder / "0-1").read_text() == "launch -"
    assert [(job.job.key.rank, job.job.key.attempt) for job in machines.jobs] == [(0, 0), (1, 0), (0, 1)]
    also_waiting = is_kept(there)
    come(folder, "1-1")
    assert (folder / "1-1").read_text() == "added yes"
    limits = {job.job.key.rank: job.job.limit_s for job in machines.jobs[:2]}
    assert limits[0] != limits[1] == machines.jobs[-1].job.limit_s
    (folder / "go").touch()
    waiting.join()
    also_waiting.join()
    assert run.results() == [[0, 1], [1, 1]]


def test_what_is_added_changes_nothing_of_what_the_launch_is_started_with(machines: Machines, folder: Path) -> None:
    def holders() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "replicas-lease"]

    before = {*holders()}
    run = launched(folder, AnyFakeExecutor(), restarts="3,backoff=0s", env={"WORD": "launch"})
    lease = bytes(run.store.get("otter/lease.json"))
    assert run.add(local(), 1, env={"WORD": "added", "MORE": "yes"}) == [1]
    assert run.add(AnyFakeExecutor(), 1, env={"WORD": "added"}) == [2]
    come(folder, "1-0", "2-0")
    waiting = is_kept(run)
    machines.end(machines.jobs[0], "preempted")
    come(folder, "0-1")
    assert (folder / "0-1").read_text() == "launch -"
    assert len({job.job.env[LEASE_S] for job in machines.jobs}) == 1
    assert bytes(run.store.get("otter/lease.json")) == lease, "who launched holds it"
    (folder / "go").touch()
    waiting.join()
    assert run.results() == [[0, 1], [1, 0], [2, 0]]
    eventually(lambda: {*holders()} <= before, "nobody holds its lease any more")


def test_a_resume_gives_each_what_it_was_given_and_asks_for_nothing_that_somebody_else_wrote(
    machines: Machines, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("S", "a secret of this machine")
    run = launched(folder, AnyFakeExecutor(), secrets=["S"], env={"WORD": "launch"}, detach=True)
    added: Any = {"env": {"WORD": "added", "MORE": "yes"}, "detach": True}
    with pytest.raises(BackendError, match="NOT_THERE"):
        run.add(AnyFakeExecutor(), 1, secrets=["NOT_THERE"], **added)
    assert run.add(AnyFakeExecutor(), 1, secrets=["T"], **added) == [1]
    assert run.add(local(), 1, env={"WORD": "w"}, detach=True) == [2]
    come(folder, "1-0", "2-0")
    run.cancel()
    hostile = {"backend": "modal", "ranks": [3], "nonce": "x", "env": ["AWS_KEY"], "secrets": ["ITS"]}
    run.store.put(added_key("otter", 2), to_bytes(hostile))
    with pytest.raises(ValueError, match=r"Rank 1 of run 'otter' came with the variable 'MORE', whose value"):
        resume(attach("otter"), env={"WORD": "again"}, detach=True)
    with pytest.raises(ValueError, match="'AWS_KEY'"):
        resume(attach("otter"), ranks=[3], env={"WORD": "again"}, detach=True)
    resume(attach("otter"), ranks=[0], env={"WORD": "again"}, detach=True)
    given = {"WORD": "again", "MORE": "more", "AWS_KEY": "key"}
    resume(attach("otter"), env=given, secrets=["T", "NEW"], detach=True)
    come(folder, "0-1", "1-1", "2-1")
    assert [(folder / name).read_text() for name in ("0-1", "1-1", "2-1")] == ["again -", "again more", "again -"]
    names = {(job.job.key.rank, job.job.key.attempt): job.job.secret_names for job in machines.jobs}
    assert names == {(0, 0): ("S",), (1, 0): ("T",), (0, 1): ("S",), (1, 1): ("T", "NEW")}
    (folder / "go").touch()


def test_a_variable_that_an_addition_or_a_resume_brings_is_filled_in_like_those_of_the_launch(
    machines: Machines, folder: Path
) -> None:
    word, more = "w-${rank}.${attempt}", "m-$${rank}-${rank}.${attempt}"
    run = launched(folder, AnyFakeExecutor(), env={"WORD": word}, detach=True)
    for executor in (AnyFakeExecutor(), local()):
        run.add(executor, 1, env={"WORD": word, "MORE": more}, detach=True)
    come(folder, "1-0", "2-0")
    run.cancel()
    resume(run, env={"WORD": word, "MORE": more, "LAST": ", l-${rank}"}, detach=True)
    come(folder, "0-1", "1-1", "2-1")
    said = {name: (folder / name).read_text() for name in ("0-0", "1-0", "2-0", "0-1", "1-1", "2-1")}
    added = {f"{rank}-0": f"w-{rank}.0 m-${{rank}}-{rank}.0" for rank in (1, 2)}
    resumed = {f"{rank}-1": f"w-{rank}.1 m-${{rank}}-{rank}.1, l-{rank}" for rank in (1, 2)}
    assert said == {"0-0": "w-0.0 -", **added, "0-1": "w-0.1 -, l-0", **resumed}
    (folder / "go").touch()


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    """Those of another account."""
    made = Machines(tmp_path / "others")
    monkeypatch.setitem(AnyFakeExecutor.accounts, "other", made)
    yield made
    made.close()


def test_an_option_is_asked_for_where_it_is_needed_and_several_backends_are_given_theirs_at_once(
    others: Machines, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    others.is_held = True
    made = {"fake": AnyFakeExecutor("other"), "other": OtherFakeExecutor("other")}
    asked: Any = {"args": {"folder": str(folder)}, "detach": True, "rendezvous": tmp_path / "shared"}
    run = launch(executor_of("fake:1,other:1", made.__getitem__), "job.py:main", 2, run_id="otter", **asked)
    known: Any = {"task_digest": run.task_digest, "detach": True}
    run.cancel()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    for given, option in ((None, "fake"), (made["fake"], "other"), (made["other"], "fake")):
        with pytest.raises(ValueError, match=rf"Give it again: --option {option}\.account=…, or attach\(…, exec"):
            resume(attach(run.url, executor=given), **known)
    again = resume(attach(run.url, executor=made["other"]), ranks=[1], **known)
    assert others.living() == [(1, 1)]
    again.cancel()
    alone = attach(run.url, executor=made["other"])
    task = vouched_task(alone, task_digest=known["task_digest"])
    (recipe,) = recipes_of(alone, task, ranks=[1], detach=True)
    assert recipe.spec.ranks == (1,), "it does not start again what it has no options for"
    both = ["fake.account=other", "other.account=other"]
    again = resume(find_run(run.url, None, option=both), **known)
    assert others.living() == [(0, 1), (1, 2)]
    again.cancel()
    again = resume(attach(run.url, executor=[*made.values()]), **known)
    assert others.living() == [(0, 2), (1, 3)]
    again.cancel()
    assert again.wait(60)
    with pytest.raises(UsageProblem, match=r"--option belongs to a backend: give --backend, too"):
        find_run(run.url, None, option=["account=other"])
    with pytest.raises(BackendError, match=r"No backend named 'faek'\. Did you mean 'fake'"):
        find_run(run.url, None, option=["faek.account=other"])
    monkeypatch.delitem(BUILT_IN, "fake")
    with pytest.raises(BackendError, match=r"Rank 0 of run 'otter' cannot be started here, .*resume otter --rank 1"):
        resume(attach(run.url, executor=made["other"]), **known)


def test_an_addition_can_do_without_the_secrets_and_the_gpu_of_the_launch(
    machines: Machines,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    machines.is_held = True
    ask: Any = {"detach": True}
    terms: Any = {"run_id": "otter", "args": {"folder": str(folder)}, "secrets": ["S", "U"], "gpu": "H100:2"}
    run = launch(AnyFakeExecutor(), "job.py:main", 1, rendezvous=tmp_path / "shared", **terms, **ask)
    run.add(AnyFakeExecutor(), 1, **ask)
    run.add(AnyFakeExecutor(), 1, secrets=(), gpu="", **ask)
    assert "secret" not in capsys.readouterr().err
    run.add(OtherFakeExecutor(), 1, **ask)
    assert (
        "what is added on 'other' gets none of the launch's secrets, which are of 'fake': S, U"
        in capsys.readouterr().err
    )
    run.add(OtherFakeExecutor(), 1, secrets=["T"], gpu="A100", **ask)
    given = [(("S", "U"), "H100:2")] * 2 + [((), None), ((), "H100:2"), (("T",), "A100")]
    assert [(job.job.secret_names, job.job.gpu) for job in machines.jobs] == given
    run.cancel(2)
    resume(run, ranks=[2], detach=True)
    assert (machines.jobs[-1].job.secret_names, machines.jobs[-1].job.gpu) == ((), None)
    one_gpu = LocalProcessExecutor(preload=(), gpus=["0"])
    with pytest.raises(BackendError, match=r"replica with 2 GPUs needs more than this machine has, which is 1") as info:
        run.add(one_gpu, 1)
    assert info.value.__notes__ == ["The GPU 'H100:2' is the launch's: give another with --gpu, or --gpu '' for none."]
    with pytest.raises(ValueError, match="more than 0 seconds") as refused:
        run.add(AnyFakeExecutor(), 1, gpu="", timeout=-1)
    assert refused.value.__notes__ == [
        "The launch's secrets count here, too: 'S', 'U'. Name others with --secret, or '' for none."
    ]
    with pytest.raises(BackendError, match="NOT_THERE") as info:
        run.add(AnyFakeExecutor(), 1, secrets=["NOT_THERE"], gpu="")
    assert not hasattr(info.value, "__notes__")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(ValueError, match=r"Name all again: --secret S --secret U or secrets=\['S', 'U'\]"):
        attach(run.url).add(AnyFakeExecutor(), 1, trust_bucket=True)
    assert attach(run.url).add(AnyFakeExecutor(), 1, secrets=(), trust_bucket=True, **ask) == [5]
    assert machines.jobs[-1].job.secret_names == ()


def test_what_a_run_with_code_was_not_launched_with_is_not_installed_for_some_of_it(
    machines: Machines, folder: Path
) -> None:
    run = launched(folder, installing(" numpy"), detach=True)
    words = r"'flash-attn' of pip= is none of those that these replicas of run 'otter' were launched with"
    with pytest.raises(ValueError, match=words):
        run.add(installing("numpy", "flash-attn"), 1)
    assert run.ranks == [0]
    assert run.add(installing("numpy "), 1, detach=True) == [1]
    run.cancel()
    with pytest.raises(ValueError, match=words):
        resume(attach("otter", executor=installing("flash-attn")))
    there = attach("otter", executor=installing("flash-attn"))
    with pytest.raises(ValueError, match=words):
        recipes_of(there, vouched_task(there))
    assert not machines.living()
    resume(attach("otter", executor=installing("numpy")), detach=True)
    assert machines.living() == [(0, 1), (1, 1)]
    (folder / "go").touch()


def test_what_is_added_to_a_run_without_code_comes_back_with_its_own_requirements(
    machines: Machines, folder: Path
) -> None:
    run = launched(folder, local(), detach=True)
    assert run.add(installing("numpy"), 1, detach=True) == [1]
    come(folder, "1-0")
    assert "numpy" in machines.jobs[0].job.requirements
    run.cancel(1)
    with pytest.raises(ValueError, match="'flash-attn' of pip="):
        resume(attach("otter", executor=installing("flash-attn")), ranks=[1])
    resume(attach("otter", executor=installing("numpy")), ranks=[1], detach=True)
    come(folder, "1-1")
    (folder / "go").touch()


def test_each_rank_goes_by_the_executor_that_started_it_also_of_two_of_one_backend(
    machines: Machines, others: Machines, folder: Path
) -> None:
    run = launched(folder, AnyFakeExecutor(), detach=True)
    there = attach("otter", executor=AnyFakeExecutor())
    assert there.add(AnyFakeExecutor("other"), 1, detach=True) == [1]
    come(folder, "1-0")
    assert [str(each.status) for each in run.status().replicas] == ["running"] * 2
    run.cancel(1)
    assert (machines.living(), others.living()) == ([(0, 0)], [])
    again = resume(there, ranks=[1], detach=True)
    come(folder, "1-1")
    assert (machines.living(), others.living()) == ([(0, 0)], [(1, 1)])
    again.cancel(1)
    resume(again, ranks=[1], detach=True)
    come(folder, "1-2")
    assert (machines.living(), others.living()) == ([(0, 0)], [(1, 2)])
    (folder / "go").touch()
    assert run.results() == [[0, 0], [1, 2]]


def test_a_cancel_ends_all_that_it_can_before_it_tells_of_what_it_cannot(
    machines: Machines, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.store.parallel.MAX_THREADS", 1)
    run = launched(folder, AnyFakeExecutor(), detach=True)
    assert run.add(local(), 1, detach=True) == [1]
    come(folder, "1-0")
    machines.fail("verify", "rejected", times=None)
    handle = Attempt(run.store, "otter", 0).key("handle.json")
    run.store.put(handle, bytes(run.store.get(handle)).replace(b"job-0", b"job-9"))
    with pytest.raises(BackendError):
        attach("otter").cancel()
    assert str(run.status().replicas[1].status) == "cancelled"
    machines.forgive()


@pytest.mark.usefixtures("quick_tries")
def test_no_keeper_goes_on_with_an_addition_that_failed(machines: Machines, folder: Path) -> None:
    run = launched(folder, local(), restarts="3,backoff=0s", detach=True)
    machines.fail("start", "rejected", times=None)
    with pytest.raises(LaunchError, match="Fake: rejected, as the test asked"):
        run.add(AnyFakeExecutor(), 1)
    machines.forgive()
    keeper = attach("otter")
    keeper.keep_here(recipes_of(keeper, vouched_task(keeper), detach=True), None)
    keeper.keep(keeper.status().replicas)
    log = DecisionLog(run.store, "otter").read()
    assert [(entry.kind, entry.rank) for entry in log] == [("cancel", 1)]
    (folder / "go").touch()
    assert run.wait(60)
    assert not machines.jobs


def test_a_cancel_after_a_resume_counts_for_what_is_being_added(
    folder: Path, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = launched(folder, local(), detach=True)
    run.cancel()
    resume(run, detach=True)
    come(folder, "0-1")
    take = take_ranks

    def cancelled(*args: Any) -> Added:
        run.request_cancel()
        return take(*args)

    monkeypatch.setattr("executors.run.addition.take_ranks", cancelled)
    with pytest.raises(LaunchError, match="Run 'otter' was ended meanwhile: nothing is added to it"):
        run.add(AnyFakeExecutor(), 1)
    assert not machines.jobs


def test_later_attempts_of_what_was_added_run_the_code_of_the_first(
    machines: Machines, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = launched(folder, local(), restarts="3,backoff=0s", rendezvous=str(tmp_path / "shared"))
    assert run.add(AnyFakeExecutor(), 1) == [1]
    come(folder, "1-0")
    Path("job.py").write_text(MAIN.replace("said =", "said = 'changed' +"))
    monkeypatch.chdir(folder)
    waiting = is_kept(run)
    machines.end(machines.jobs[0], "preempted")
    come(folder, "1-1")
    run.cancel()
    waiting.join()
    resume(attach("otter"), ranks=[1], detach=True)
    come(folder, "1-2")
    assert [(folder / name).read_text() for name in ("1-0", "1-1", "1-2")] == ["- -"] * 3
    assert len({entry.key.split("/")[1] for entry in run.store.list("otter/task-")}) == 1
    run.cancel()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(UntrustedTaskError, match=r"Rank 1 .* code of its own"):
        resume(attach(run.url), ranks=[1], task_digest=run.record.task_digest)
    resume(attach(run.url), ranks=[1], trust_bucket=True, detach=True)
    come(folder, "1-3")
    assert (folder / "1-3").read_text() == "- -"


def test_a_pickle_of_another_python_is_refused_before_anything_is_added_resumed_or_launched(
    machines: Machines, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, here = str(folder / "go"), "{}.{}".format(*sys.version_info)

    def wait() -> None:
        eventually(lambda: Path(place).exists(), "it may go on", within_s=60)

    run = launch(local(), wait, 1, run_id="otter", detach=True)
    monkeypatch.setattr(AnyFakeJobs, "python_of_replicas", "3.99", raising=False)
    refusal = f"was pickled by Python {here}, and replicas on 'fake' would run 3.99"
    with pytest.raises(ValueError, match=f"The callable of run 'otter' {refusal}"):
        run.add(AnyFakeExecutor(), 1)
    assert not exists(run.store, added_key("otter", 0))
    with pytest.raises(ValueError, match=f"{refusal}. Run this with Python {here}"):
        launch(executor_of("local:1,fake:1", lambda name: AnyFakeExecutor() if name == "fake" else local()), wait, 2)
    run.cancel()
    monkeypatch.setattr(LocalProcessExecutor, "python_of_replicas", "3.99")
    with pytest.raises(ValueError, match=r"on 'local' would run 3\.99\. Run this with"):
        resume(run)
    by_name = launched(folder, AnyFakeExecutor(), run_id="badger", detach=True)
    assert by_name.add(AnyFakeExecutor(), 1, detach=True) == [1], "what has a name is imported"
    (folder / "go").touch()
    assert by_name.results() == [[0, 0], [1, 0]]


def test_replicas_are_added_to_a_run_whose_executor_is_not_known_here(folder: Path) -> None:
    class Unregistered(LocalProcessExecutor):
        pass

    launched(folder, Unregistered(preload=(), term_grace_s=0.5), detach=True)
    assert attach("otter").add(local(), 1, detach=True) == [1]
    come(folder, "1-0")
    (folder / "go").touch()
