"""A replica in a container: `python -m executors.supervisor`, started by the bootstrap on a machine of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from servers.isolation.gpu import write_torch
from servers.s3.server import S3Server
from support.new_runs import run_spec
from support.standalone_replicas import (
    LIMIT_S,
    TASKS,
    Cloud,
    StandaloneScene,
    cloud,
    ended,
    outcome_of,
    shared,
    ship,
    site,
    workspace,
    write_files,
)

from executors import attach, open_store
from executors.attempt import Attempt
from executors.run.run import view_of
from executors.shipping.package import replica_environment
from executors.store.url import address_of

__all__ = ["cloud", "shared", "site", "workspace"]  # fixtures

ROOT = Path(__file__).parents[2]

# Whole runs


def test_a_replica_leaves_nothing_on_its_machine(site: StandaloneScene) -> None:
    machine = site.cloud.folder / "machine of 0"
    for number, task in enumerate(("shows", "fails", "dies")):
        args = {"how": "kill"} if task == "dies" else None
        _, process = site.start(task, args=args, run_id=f"otter-{number}")
        ended(process)
        assert list(machine.iterdir()) == [], task


def test_an_attempt_that_has_ended_is_not_begun_again_by_its_service(site: StandaloneScene) -> None:
    spec, process = site.start("fails")
    assert ended(process)[0] == 1
    before = outcome_of(spec)
    code, out, err = ended(site.cloud.start(spec))
    assert (code, out, err) == (0, "replicas: attempt 0 of rank 0 has ended; it is not started again\n", "")
    assert outcome_of(spec) == before
    assert not Attempt(open_store(spec.store_url), "otter", 0, 1).has("started.json")


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
    code = view_of(run).record.code
    assert code is not None
    assert code["n_files"] == 1
    assert code["size_bytes"] == len(TASKS)
    assert (code["commit"], code["dirty"]) == (None, None)
    keys = [entry.key for entry in view_of(run).store.list("otter/task/")]
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
    monkeypatch.syspath_prepend(str(workspace / "src"))  # the launcher imports modules from this folder
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


def test_a_replica_does_not_start_where_torch_does_not_see_the_gpu_that_was_asked_for(site: StandaloneScene) -> None:
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
            assert ended(site.cloud.start(spec, environ=environ))[0] == 0, (
                "the replica starts, because it does not train with torch"
            )
    spec = ship(site.shared, site.workspace, "tasks_of_user:talks", run_id="of-before")
    assert outcome_of(replace(spec, run_id="gpu-false")).error == (
        "gpu='H100:2' was asked for, and torch sees no GPU: torch 2.13.0 is built for CUDA 13.0. The NVIDIA driver is "
        "550.54.15: if that is too old for this CUDA, require an older torch or choose an image with one. If this "
        "trains with jax or tensorflow, import that at the top of the entrypoint's file."
    )


def test_a_container_whose_torch_starts_threads_starts_its_replica_as_a_new_process(site: StandaloneScene) -> None:
    torch = write_torch(site.cloud.folder / "torch", sees_gpu=True)
    with (torch / "torch.py").open("a") as file:
        file.write("\nimport threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n")
    task = "import torch\nimport os, signal\nfrom executors import current_replica\n"
    task += "def main():\n    print('attempt', current_replica().attempt)\n"
    task += "    return current_replica().attempt or os.kill(os.getpid(), signal.SIGKILL)\n"
    write_files(site.workspace, of_torch=task)
    spec = ship(site.shared, site.workspace, "of_torch").with_settings(restarts="1")
    environ = {"PYTHONPATH": str(torch)}
    code, out, _ = ended(site.cloud.start(spec, environ=environ))
    outcome = outcome_of(replace(spec, attempt=1))
    assert (code, outcome.result, outcome.output_tail) == (0, 1, "attempt 1\n"), out
    assert out.count("So each replica is a new process and imports by itself.") == 1
    assert "importing torch, torch._dynamo started a thread (" in out


# The environment of a replica


def test_versions_that_differ_from_the_launchers_are_reported_before_the_entrypoint_is_loaded(
    cloud: Cloud, tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = write_files(tmp_path / "work space", loud_of_user="print('loaded')\ndef main(): ...")
    launchers = {"python_version": "3.99.1", "torch": "1.0.0"}
    monkeypatch.setattr("executors.task.create.versions_here", lambda: launchers)
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


def test_a_process_without_a_needed_variable_names_that_variable(cloud: Cloud) -> None:
    spec = run_spec("otter", "file:///nowhere", "00", 1, (0,))
    command = [str(cloud.python), "-P", "-m", "executors.supervisor"]
    for missing in ("REPLICA_RANK", "REPLICA_TASK_DIGEST"):
        environ = {**cloud.environ(), **replica_environment(spec, 0), "PYTHONPATH": str(ROOT)}
        del environ[missing]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (78, "", 1)
        assert f"{missing} is not set" in done.stderr


def test_a_replicas_environment_has_its_time_limit_and_not_the_users_variables() -> None:
    environ = replica_environment(run_spec("otter", "s3://bucket/runs", "00", 2, (0, 1), env={"A": "b"}), 1, 60.0)
    assert environ["REPLICA_RENDEZVOUS"] == "s3://bucket/runs"
    assert environ["REPLICA_TIMEOUT_S"] == "60.0"
    assert "A" not in environ
    assert environ["REPLICA_ENV"] == "A", "REPLICA_ENV names the variable whose placeholders are replaced"
