"""Added and resumed replicas get the options, secrets, variables and requirements of their own addition or resume."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from support.fake_jobs import Machines
from support.placements import (
    AnyFakeExecutor,
    AnyFakeJobs,
    OtherFakeExecutor,
    come,
    folder,
    installing,
    launched,
    local,
    others,
)

from executors import LocalProcessExecutor, attach, launch
from executors.cli.options import find_run
from executors.cli.output import UsageProblem
from executors.errors import BackendError
from executors.launcher.several_backends import executor_of
from executors.registry import BUILT_IN
from executors.run.resume import resume
from executors.run.run import view_of
from executors.run.start_spec import start_specs_of, trusted_task
from executors.store.added_ranks import added_key
from executors.store.records import exists, to_bytes
from executors.testing import eventually

__all__ = ["folder", "others"]  # fixtures


def test_a_resume_gives_each_rank_its_first_values_and_requests_none_that_another_user_wrote(
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
    view_of(run).store.put(added_key("otter", 2), to_bytes(hostile))
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


def test_an_option_is_asked_for_where_it_is_needed_and_several_backends_are_given_theirs_at_once(
    others: Machines, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    others.is_held = True
    made = {"fake": AnyFakeExecutor("other"), "other": OtherFakeExecutor("other")}
    asked: Any = {"args": {"folder": str(folder)}, "detach": True, "rendezvous": tmp_path / "shared"}
    run = launch(executor_of("fake:1,other:1", made.__getitem__), "job.py:main", 2, run_id="otter", **asked)
    known: Any = {"task_digest": view_of(run).task_digest, "detach": True}
    run.cancel()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    for given, option in ((None, "fake"), (made["fake"], "other"), (made["other"], "fake")):
        with pytest.raises(ValueError, match=rf"Give it again: --option {option}\.account=…, or attach\(…, exec"):
            resume(attach(run.url, executor=given), **known)
    again = resume(attach(run.url, executor=made["other"]), ranks=[1], **known)
    assert others.living() == [(1, 1)]
    again.cancel()
    alone = attach(run.url, executor=made["other"])
    task = trusted_task(view_of(alone), task_digest=known["task_digest"])
    (start_spec,) = start_specs_of(view_of(alone), task, ranks=[1], detach=True)
    assert start_spec.spec.ranks == (1,), "the process starts only the rank whose options it has"
    both = ["fake.account=other", "other.account=other"]
    again = resume(find_run(run.url, None, option=both), **known)
    assert others.living() == [(0, 1), (1, 2)]
    again.cancel()
    again = resume(attach(run.url, executor=[*made.values()]), **known)
    assert others.living() == [(0, 2), (1, 3)]
    again.cancel()
    assert again.wait(60)
    with pytest.raises(UsageProblem, match=r"does not name its backend. Add --backend NAME"):
        find_run(run.url, None, option=["account=other"])
    with pytest.raises(BackendError, match=r"No backend named 'faek'\. Did you mean 'fake'"):
        find_run(run.url, None, option=["faek.account=other"])
    monkeypatch.delitem(BUILT_IN, "fake")
    with pytest.raises(BackendError, match=r"Rank 0 of run 'otter' cannot be started here, .*resume otter --rank 1"):
        resume(attach(run.url, executor=made["other"]), **known)


def test_a_list_of_executors_is_of_executors_each_of_its_own_backend(folder: Path) -> None:
    launch(local(), "job.py:main", 1, run_id="otter", args={"folder": str(folder)}, detach=True)
    with pytest.raises(ValueError, match=r"2 of these executors are of backend 'fake'.* Give one"):
        attach("otter", executor=[AnyFakeExecutor(), local(), AnyFakeExecutor()])
    with pytest.raises(TypeError, match="str is not a ServerlessExecutor"):
        attach("otter", executor=["local"])  # type: ignore[list-item]


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
        "the replicas added on 'other' get none of the launch's secrets, which belong to 'fake': S, U"
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


def test_a_requirement_that_the_launch_did_not_have_is_refused_for_an_addition(
    machines: Machines, folder: Path
) -> None:
    run = launched(folder, installing(" numpy"), detach=True)
    words = r"'flash-attn' of pip= is new: run 'otter' was launched without it"
    with pytest.raises(ValueError, match=words):
        run.add(installing("numpy", "flash-attn"), 1)
    assert run.ranks == [0]
    assert run.add(installing("numpy "), 1, detach=True) == [1]
    run.cancel()
    with pytest.raises(ValueError, match=words):
        resume(attach("otter", executor=installing("flash-attn")))
    there = attach("otter", executor=installing("flash-attn"))
    with pytest.raises(ValueError, match=words):
        start_specs_of(view_of(there), trusted_task(view_of(there)))
    assert not machines.living()
    resume(attach("otter", executor=installing("numpy")), detach=True)
    assert machines.living() == [(0, 1), (1, 1)]
    (folder / "go").touch()


def test_an_added_rank_of_a_run_without_code_restarts_with_its_own_requirements(
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


def test_a_pickle_of_another_python_is_refused_before_anything_is_added_resumed_or_launched(
    machines: Machines, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, here = str(folder / "go"), "{}.{}".format(*sys.version_info)

    def wait() -> None:
        eventually(lambda: Path(place).exists(), "the file that lets the replica continue exists", within_s=60)

    run = launch(local(), wait, 1, run_id="otter", detach=True)
    monkeypatch.setattr(AnyFakeJobs, "python_of_replicas", "3.99", raising=False)
    refusal = f"was pickled by Python {here}, and replicas on 'fake' would run 3.99"
    with pytest.raises(ValueError, match=f"The callable of run 'otter' {refusal}"):
        run.add(AnyFakeExecutor(), 1)
    assert not exists(view_of(run).store, added_key("otter", 0))
    with pytest.raises(ValueError, match=f"{refusal}. Run this with Python {here}"):
        launch(executor_of("local:1,fake:1", lambda name: AnyFakeExecutor() if name == "fake" else local()), wait, 2)
    run.cancel()
    monkeypatch.setattr(LocalProcessExecutor, "python_of_replicas", "3.99")
    with pytest.raises(ValueError, match=r"on 'local' would run 3\.99\. Run this with"):
        resume(run)
    by_name = launched(folder, AnyFakeExecutor(), run_id="badger", detach=True)
    assert by_name.add(AnyFakeExecutor(), 1, detach=True) == [1], "an entrypoint that is given by name needs no pickle"
    (folder / "go").touch()
    assert by_name.results() == [[0, 0], [1, 0]]
