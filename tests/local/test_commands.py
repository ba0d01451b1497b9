"""Replicas that run a command: `launch(command=[…])`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executors import LocalProcessExecutor, launch
from executors.errors import EntrypointImportError
from executors.protocol import Outcome, ReplicaStatus
from executors.run.run import Run, view_of
from executors.task.stored import read_task
from executors.worker.run_command import read_error

SAVES = """
import os, signal, sys, time
from pathlib import Path

folder, name = Path(sys.argv[1]), sys.argv[2]

def save(*_):
    with (folder / f"asked-{name}").open("a") as asked:
        asked.write("x")
    time.sleep(0.7)
    (folder / f"saved-{name}").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
(folder / f"ready-{name}").touch()
while True:
    time.sleep(0.05)
"""
STARTS = """
import subprocess, sys, time
from pathlib import Path

folder, saves = Path(sys.argv[1]), sys.argv[2]
# Two in its process group, and one in a session of its own.
children = [
    subprocess.Popen([sys.executable, saves, str(folder), str(number)], start_new_session=number == 2)
    for number in range(3)
]
while len(list(folder.glob("ready-*"))) < 3:
    time.sleep(0.01)
(folder / "begun").touch()
time.sleep(60)
"""
REPORTS = """
import sys
from executors import current_replica

replica = current_replica()
replica.report(step=int(sys.argv[1]), loss=1.0)
print(replica.page is not None)
"""
HANGS = """
import os, pathlib, sys, time
from executors import current_replica

def hang():
    time.sleep(600)

def exists(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

kind, *before = sys.argv[1:] or [""]
imported = pathlib.Path("imported")
if kind == "first":  # the second process must not spend the limit on imports
    while not imported.exists():
        time.sleep(0.01)
if kind == "second":
    imported.touch()
    while exists(int(before[0])):
        time.sleep(0.01)
replica = current_replica()
for step in range(10):
    replica.report(step=step)
if kind == "first":
    sys.exit()
hang()
"""
TRAINS = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from diloco import DiLoCo

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with DiLoCo(model, inner_steps=2, total_steps=6) as diloco:
    for _ in diloco.steps():
        model(torch.full((1, 2), 1.0 + int(os.environ["REPLICA_RANK"]))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        diloco.step()
dist.destroy_process_group()
"""
RAISES = """
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise ValueError("no luck")

main()
"""
KILLED = """
import os, signal
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
"""

pytestmark = pytest.mark.usefixtures("state_home")


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Run]:
    local = LocalProcessExecutor(preload=(), term_grace_s=10.0)

    def start(*command: object, n: int = 1, **more: Any) -> Run:
        return launch(local, command=[str(word) for word in command], n=n, **more)

    return start


def ended(run: Run) -> Outcome:
    run.wait(60)
    (outcome,) = run.outcomes()
    assert outcome is not None
    return outcome


def wait_for(folder: Path, *names: str) -> None:
    while not all((folder / name).exists() for name in names):
        time.sleep(0.01)


def test_a_command_that_ends_with_0_has_succeeded_and_its_words_are_in_the_records(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start("sh", "-c", f"echo rank $REPLICA_RANK of $0 > {tmp_path}/out-${{rank}}", "${world_size}", n=2)
    run.wait(60)
    assert [(each.status, each.result, each.exit_code) for each in run.outcomes() if each] == [
        (ReplicaStatus.SUCCEEDED, None, 0)
    ] * 2
    assert [(tmp_path / f"out-{rank}").read_text() for rank in (0, 1)] == ["rank 0 of 2\n", "rank 1 of 2\n"]
    view = view_of(run)
    record, task = view.record, read_task(view.store, run.run_id).record
    assert (task.entrypoint, task.command and task.command[:2]) == (None, ("sh", "-c"))
    assert record.entrypoint.startswith("sh -c 'echo rank $REPLICA_RANK")


@pytest.mark.parametrize(
    ("script", "exit_code", "by", "says"),
    [
        ("echo 'Error: too few apples' >&2; exit 7", 7, None, "ended with exit code 7. It printed: Error: too few"),
        ("kill -KILL $$", -signal.SIGKILL, "SIGKILL", "was ended by signal 9 (SIGKILL)."),
    ],
)
def test_the_outcome_of_a_failed_command_has_its_exit_code_or_signal_and_the_line_that_it_printed(
    start: Callable[..., Run], script: str, exit_code: int, by: str | None, says: str
) -> None:
    outcome = ended(start("sh", "-c", script))
    assert (outcome.reason, outcome.exit_code, outcome.signal) == ("no_result", exit_code, by)
    assert str(outcome.error).startswith("The command ")
    assert says in str(outcome.error)


def test_a_killed_worker_of_a_command_leaves_no_temporary_folder(start: Callable[..., Run], tmp_path: Path) -> None:
    """Its supervisor kills it if the command ignores SIGTERM, and then it cannot remove the folder itself."""
    run = start("sh", "-c", f'echo "$TORCHELASTIC_ERROR_FILE" > {tmp_path}/name; kill -KILL $PPID; sleep 60')
    assert ended(run).reason == "signal"
    folder = Path((tmp_path / "name").read_text().strip()).parent
    assert folder.name.startswith("replicas-worker-")
    assert not folder.exists()


def test_the_outcome_of_a_command_has_the_error_that_it_left_for_torchrun(start: Callable[..., Run]) -> None:
    script = (
        "import json, os; "
        "noted = {'message': 'x', 'extraInfo': {'py_callstack': 'Traceback\\n  x\\nValueError: no luck'}}; "
        "json.dump({'message': noted}, open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w')); os._exit(3)"
    )
    outcome = ended(start("python", "-c", script))
    assert (outcome.reason, outcome.exit_code, outcome.error_line) == ("exception", 3, "ValueError: no luck")
    assert str(outcome.error).endswith(" ended with exit code 3.\nTraceback\n  x\nValueError: no luck")


def test_the_outcome_of_a_command_has_the_traceback_that_it_printed(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def main():\n    raise ValueError('no luck')\n\nmain()\n")
    outcome = ended(start("sh", "-c", "python $0; echo left; exit 3", tmp_path / "train.py"))
    assert (outcome.reason, outcome.exit_code, outcome.error_line) == ("exception", 3, "ValueError: no luck")
    assert outcome.error_place == "train.py:2"
    assert f'File "{tmp_path}/train.py", line 2, in main' in str(outcome.error)


def test_a_command_is_started_by_a_process_that_has_not_imported_torch() -> None:
    run = launch("local", command=["sh", "-c", "! grep -q libtorch /proc/$PPID/maps"], n=1)
    assert ended(run).status is ReplicaStatus.SUCCEEDED


def test_replicas_whose_launcher_of_torch_trains_alone_get_a_warning(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "torchrun").write_text("#!/bin/sh\n")
    (tmp_path / "torchrun").chmod(0o755)
    (tmp_path / "knows.py").write_text("rank = os.environ['REPLICA_RANK']\n")
    torchrun = tmp_path / "torchrun"
    commands: list[tuple[list[object], bool]] = [
        ([torchrun, "train.py"], True),
        ([torchrun, "train.py", "--out", "out-${rank}"], False),
        ([torchrun, tmp_path / "knows.py"], False),
        (["sh", "-c", "true"], False),
    ]
    for command, is_alone in commands:
        run = start(*command, n=2)
        run.wait(60)
        outcomes = [each for each in run.outcomes() if each is not None]
        assert [each.trained_alone for each in outcomes] == [is_alone] * 2, command


def test_a_cancel_asks_each_process_of_a_command_once_and_waits_until_all_have_saved(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    (tmp_path / "saves.py").write_text(SAVES)
    (tmp_path / "starts.py").write_text(STARTS)
    run = start("python", tmp_path / "starts.py", tmp_path, tmp_path / "saves.py")
    wait_for(tmp_path, "begun")
    run.cancel()
    outcome = ended(run)
    assert (outcome.status, outcome.error) == (ReplicaStatus.CANCELLED, "Replica 0 was ended: cancelled by the user.")
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1", "saved-2"]
    assert [(tmp_path / f"asked-{number}").read_text() for number in range(3)] == ["x"] * 3


def test_a_command_that_answers_a_cancel_with_0_is_cancelled(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(SAVES)
    run = start("python", tmp_path / "saves.py", tmp_path, "0")
    wait_for(tmp_path, "ready-0")
    run.cancel()
    assert ended(run).status is ReplicaStatus.CANCELLED
    assert (tmp_path / "saved-0").exists()


def test_a_failed_command_is_restarted_by_the_cap_of_its_exit_code(start: Callable[..., Run]) -> None:
    outcome = ended(start("sh", "-c", 'test "$REPLICA_ATTEMPT" = 2 || exit 75', restarts="0,75=inf"))
    assert (outcome.status, outcome.attempt) == (ReplicaStatus.SUCCEEDED, 2)


def test_each_member_runs_the_command_with_its_own_variables(start: Callable[..., Run], tmp_path: Path) -> None:
    outcome = ended(start("sh", "-c", f"touch {tmp_path}/ran-$RANK-of-$WORLD_SIZE-${{member}}", procs=2))
    assert outcome.status is ReplicaStatus.SUCCEEDED
    assert {"ran-0-of-2-0", "ran-1-of-2-1"} <= {*os.listdir(tmp_path)}


def test_the_member_whose_command_failed_is_named(start: Callable[..., Run]) -> None:
    outcome = ended(start("sh", "-c", 'test "$RANK" = 0 && exec sleep 60; exit 5', procs=2))
    assert (outcome.reason, outcome.exit_code, outcome.member) == ("no_result", 5, 1)
    assert str(outcome.error).startswith("Member 1 of 2 failed first.\nThe command ")


def test_the_first_process_of_a_command_that_calls_current_replica_reports_for_the_replica(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    (tmp_path / "reports.py").write_text(REPORTS)
    # A process with another RANK reports nothing. The one after the first continues its records.
    script = 'RANK=1 python "$0" 100; python "$0" 1; python "$0" 5'
    run = start("sh", "-c", script, tmp_path / "reports.py")
    outcome = ended(run)
    assert (outcome.status, outcome.output_tail.splitlines()) == (ReplicaStatus.SUCCEEDED, ["False", "True", "True"])
    assert outcome.reported is not None
    assert (outcome.reported["step"], outcome.reached) == (5, {"step": 5})
    assert [row.values["step"] for row in run.metrics().numbers] == [1, 5]


def test_the_commands_of_two_members_have_one_process_that_reports(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "reports.py").write_text(REPORTS)
    outcome = ended(start("python", tmp_path / "reports.py", 7, procs=2))
    assert (outcome.status, sorted(outcome.output_tail.splitlines())) == (ReplicaStatus.SUCCEEDED, ["False", "True"])
    assert outcome.reported is not None
    assert outcome.reported["step"] == 7


def test_the_folder_of_this_python_is_the_first_in_which_the_program_is_looked_for(start: Callable[..., Run]) -> None:
    script = f"import sys; sys.exit(sys.executable != {sys.executable!r})"
    assert ended(start("python", "-c", script)).status is ReplicaStatus.SUCCEEDED


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["train.py", "--lr", "1"], "'train.py' is not a program. Run it as a script: replicas launch train.py --n 4"),
        (["--lr", "1e-3"], "'--lr' is not a program. Name the script before its options"),
        (["no-such-program", "x"], "The program 'no-such-program' of the command is not found"),
        (
            ["no such-program"],
            "The program .* Give each word by itself, or let a shell run it: -- sh -c 'no such",
        ),
    ],
)
def test_a_command_without_a_program_is_refused_before_anything_is_written(command: list[str], says: str) -> None:
    with pytest.raises(EntrypointImportError, match=f"^{says}"):
        launch("local", command=command, n=1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"command": ["true"], "args": {"x": 1}}, "A command has all its arguments in itself"),
        ({"command": ["true"], "entrypoint": "m:f"}, "takes an entrypoint or command="),
        ({"command": ["true"], "tracker": "trackio"}, "A tracker follows the numbers of a function"),
        ({"command": []}, "command must be a program and its arguments"),
        ({"command": ["true"], "executor": "inline"}, "Backend 'inline' calls functions and runs no command"),
    ],
)
def test_a_command_with_arguments_for_a_function_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        launch(**{"executor": "local", "n": 1, **given})


def test_the_words_after_two_dashes_are_a_command_if_no_entrypoint_is_given(tmp_path: Path) -> None:
    words = ["launch", "--n", "2", "--dry-run", "--json", "--", "python", "train.py", "--lr", "${rank}"]
    answer = subprocess.run(
        [sys.executable, "-m", "executors.cli", *words], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    found = json.loads(answer.stdout)
    assert found["task_record"]["command"] == ["python", "train.py", "--lr", "${rank}"]
    assert found["task_record"]["entrypoint"] is None
    assert found["run_record"]["entrypoint"] == "python train.py --lr '${rank}'"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"message": "ChildFailed"}', "ChildFailed"),
        (b'{"message": {"message": "E: x", "extraInfo": {"py_callstack": "Traceback\\nE: x"}}}', "Traceback\nE: x"),
        (b'{"message": {"message": "E: x", "extraInfo": 7}}', "E: x"),
        (b'{"message": {"message": 7}}', None),
        (b'["message"]', None),
        (b"[" * 100_000, None),
        (b"\xff", None),
    ],
)
def test_the_error_file_of_a_command_may_hold_anything(tmp_path: Path, content: bytes, expected: str | None) -> None:
    file = tmp_path / "error.json"
    file.write_bytes(content)
    assert read_error(file) == expected


def test_a_program_that_is_missing_where_the_replica_starts_is_a_failed_start(start: Callable[..., Run]) -> None:
    outcome = ended(start("no-such-${rank}"))
    assert outcome.reason == "start_failed"
    assert "The command no-such-0 cannot be started" in str(outcome.error).replace("'", "")


def test_torchrun_leaves_the_traceback_of_the_process_that_failed_first(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    (tmp_path / "raises.py").write_text(RAISES)
    outcome = ended(start("torchrun", "--nproc-per-node", "2", tmp_path / "raises.py"))
    assert (outcome.reason, outcome.exit_code, outcome.error_line) == ("exception", 1, "ValueError: no luck")


@pytest.mark.parametrize(
    ("script", "reason", "line"),
    [
        ("raise ValueError('no luck')", "exception", "ValueError: no luck"),
        (KILLED, "no_result", "Its process with RANK 1 was ended by signal 9 (SIGKILL)."),
    ],
)
def test_the_outcome_of_a_script_of_torchrun_has_the_error_without_a_line_of_ours_in_it(
    script: str, reason: str, line: str, start: Callable[..., Run], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(script)
    outcome = ended(start("torchrun", "--nproc-per-node", "2", tmp_path / "train.py"))
    assert (outcome.reason, outcome.exit_code, outcome.error_line) == (reason, 1, line)


def test_the_measurements_of_a_run_by_torchrun_have_all_rounds(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "trains.py").write_text(TRAINS)
    run = start("torchrun", "--nproc-per-node", "2", tmp_path / "trains.py", n=2)
    run.wait(120)
    assert [outcome and outcome.status for outcome in run.outcomes()] == [ReplicaStatus.SUCCEEDED] * 2
    rounds = [(row.rank, row.entry) for row in run.metrics().rounds]
    assert rounds == [(rank, entry) for rank in (0, 1) for entry in (0, 1, 2)]


@pytest.mark.parametrize(
    "script",
    ['python "$0"', 'cd "$1"; python "$0" first & python "$0" second $!'],
    ids=["one process", "a second process"],
)
def test_a_hang_in_the_process_of_a_command_that_reports_is_found_and_its_stacks_are_kept(
    start: Callable[..., Run], tmp_path: Path, script: str
) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    run = start("sh", "-c", script, tmp_path / "hangs.py", tmp_path, hang_timeout="2:60")
    outcome = ended(run)
    assert (outcome.reason, outcome.attempt) == ("hang", 0), outcome
    assert " after step 9 (limit 2 s, --hang-timeout): " in outcome.headline
    assert ": hangs.py:6 in hang" in outcome.headline
    stacks = bytes(view_of(run).store.get(f"{run.run_id}/replicas/0000/0/{outcome.stacks[0]}")).decode()
    assert 'hangs.py", line 6 in hang' in stacks
    assert "HangError" in outcome.output_tail
