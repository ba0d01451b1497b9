"""Several processes in one replica need a process group: without one, the work of all but one would be lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.multiprocessing

from diloco import DiLoCo
from diloco.errors import DiLoCoError
from executors import current_replica, launch

CHILD = """
import sys
import torch
from diloco import DiLoCo

torch.set_num_threads(1)
with DiLoCo(torch.nn.Linear(1, 1), inner_steps=1, name=sys.argv[1]):
    print("open", flush=True)
    sys.stdin.readline()
"""


def child(name: str) -> subprocess.Popen[str]:
    """Start a process of this replica that opens a DiLoCo, prints "open", and closes it at a line of input."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", CHILD, name], text=True, **pipes)  # type: ignore[call-overload,no-any-return]


def open_in_children() -> dict[str, str]:
    """Open a DiLoCo in a process, in a second process at the same time, and later in a third process."""
    first = child("main")
    assert first.stdout is not None
    assert first.stdout.readline() == "open\n", first.communicate()[1]
    second, other_name = child("main"), child("other")
    said = {"second": second.communicate("\n", timeout=60)[1]}
    try:
        DiLoCo(torch.nn.Linear(1, 1), inner_steps=1)
    except DiLoCoError as error:
        said["parent"] = str(error)
    said["other name"] = other_name.communicate("\n", timeout=60)[0]
    said["first"] = f"{first.pid} {first.communicate('', timeout=60)[1]}{first.returncode}"
    third = child("main")
    said["third"] = third.communicate("\n", timeout=60)[1]
    return said


def test_a_second_process_of_a_replica_is_refused_at_once_and_the_first_continues() -> None:
    with launch("local", open_in_children, n=1, timeout=240) as run:
        (said,) = run.results()
    pid, _, rest = said["first"].partition(" ")
    assert rest.endswith("0"), said["first"]
    for refused in (said["second"], said["parent"]):
        assert f"Another process of this replica (pid {pid}) has the DiLoCo 'main' open." in refused
        assert "Several processes open one together in a process group, see DiLoCo's group=." in refused
    assert said["other name"] == "open\n", "a DiLoCo with another name is a separate training"
    assert "This replica has closed a DiLoCo named 'main' already" in said["third"]


def use_in_a_fork() -> tuple[str, int]:
    """Step a DiLoCo in a process that was forked after it was opened, and end that process in its context."""
    model = torch.nn.Linear(1, 1)
    reading, writing = os.pipe()
    with DiLoCo(model, inner_steps=1) as diloco:
        if (forked := os.fork()) == 0:
            try:
                with diloco:
                    diloco.step()
            except DiLoCoError as error:
                os.write(writing, f"{error}\n".encode())
            finally:
                diloco.close()
                os._exit(0)
        os.waitpid(forked, 0)
        message = os.read(reading, 10_000).decode()
        with torch.no_grad():
            model.weight += 1.0
        diloco.step()
        assert not any("/bye/" in key for key in keys_of_diloco()), "the fork has left for this process"
    return message.replace(str(os.getpid()), "PARENT").replace(str(forked), "FORK"), diloco.rounds


def keys_of_diloco() -> list[str]:
    replica = current_replica()
    return [entry.key for entry in replica.store.list(f"{replica.run_id}/diloco/")]


def test_a_diloco_is_used_and_closed_only_by_the_process_that_opened_it() -> None:
    with launch("local", use_in_a_fork, n=1, timeout=120) as run:
        ((message, rounds),) = run.results()
    assert message.startswith("Process FORK cannot use this DiLoCo: process PARENT opened it.")
    assert rounds == 1


def member(number: int, folder: str) -> None:
    """Train as one of two processes of a replica that have a process group."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=number, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    with DiLoCo(model, inner_steps=1) as diloco:
        model(torch.ones(1, 1)).backward()
        diloco.step()
    assert diloco.rounds == 1
    torch.distributed.destroy_process_group()


def train_in_two_processes(folder: str) -> list[str]:
    cast(Any, torch.multiprocessing).spawn(member, (folder,), nprocs=2)
    return keys_of_diloco()


def test_two_processes_with_a_process_group_are_one_replica(tmp_path: Path) -> None:
    with launch("local", train_in_two_processes, n=1, args={"folder": str(tmp_path)}, timeout=240) as run:
        (keys,) = run.results()
    assert sum("/process/" in key for key in keys) == 1, "the leader alone takes part"


SCRIPT = """
import torch
from diloco import DiLoCo

DiLoCo(torch.nn.Linear(1, 1), inner_steps=1)
"""


def run_torchrun(script: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("is_replica", [True, False])
def test_torchrun_is_refused_in_a_replica_and_outside_of_one(is_replica: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    if is_replica:
        with launch("local", run_torchrun, n=1, args={"script": str(script)}, timeout=240) as run:
            ((code, said),) = run.results()
    else:
        code, said = run_torchrun(str(script))
    assert code != 0
    assert "2 processes of this replica open a DiLoCo, and have no process group" in said
