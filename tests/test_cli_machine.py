"""`replicas doctor` and `backends`, and the small parts: exit codes, options, words."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from cli_of_tests import Folder

from executors import LocalProcessExecutor, ReplicaStatus
from executors.cli.backend_options import check_options, options_of
from executors.cli.options import UsageProblem
from executors.cli.output import name_age, name_duration, name_limit, name_ranks
from executors.cli.report import exit_code, find_summary
from executors.outcome import Outcome, Reason


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    (tmp_path / "work").mkdir()
    return Folder(tmp_path / "work")


# doctor and backends


def test_doctor_finds_this_machine_well(folder: Folder, tmp_path: Path) -> None:
    told = folder.replicas("doctor", "--rendezvous", tmp_path / "there", "--json")
    assert told.code == 0, told
    assert told.json["ok"] is True
    looked_at = [finding["what"] for finding in told.json["findings"]]
    assert looked_at == [
        "system", "python", "torch", "cores", "gpus", "runs", "disk", "inotify", "local backend", "rendezvous"
    ]  # fmt: skip
    assert not [path for path in (tmp_path / "there").iterdir() if path.name.startswith("doctor")]


def test_doctor_says_what_is_wrong_and_what_to_do(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = folder.replicas(
        "doctor", "--rendezvous", "/proc/nothing", environ={"XDG_STATE_HOME": str(tmp_path / "file")}
    )
    assert told.code == 1
    wrong = [line.split()[1] for line in told.stdout.splitlines() if line.startswith("wrong")]
    assert wrong == ["runs", "rendezvous"]
    assert "Set XDG_STATE_HOME to a directory you can write." in told.stdout


def test_backends_tells_every_option_its_type_its_default_and_what_it_means(folder: Folder) -> None:
    local = next(backend for backend in folder.replicas("backends", "--json").json if backend["name"] == "local")
    assert (local["ready"], local["problem"]) == (True, None)
    options = {option["name"]: option for option in local["options"]}
    assert options["max_parallel"]["type"] == "int | None"
    assert options["preload"]["default"] == ["torch", "torch._dynamo"]
    assert options["term_grace_s"]["help"].startswith("seconds between SIGTERM")
    told = folder.replicas("backends").stdout
    assert "local  ready" in told
    assert "term_grace_s float, default 5.0" in told


def test_a_backend_that_cannot_be_loaded_is_listed_with_the_reason(folder: Folder) -> None:
    package = folder.path / "broken_backend-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-backend\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[replicas.backends]\nbroken = no_such_module:Thing\n")
    told = folder.replicas("backends", "--json")
    broken = next(backend for backend in told.json if backend["name"] == "broken")
    assert broken["ready"] is False
    assert "no_such_module" in broken["problem"]


def test_the_version_is_printed(folder: Folder) -> None:
    assert folder.replicas("--version").stdout.startswith("replicas ")


def test_the_current_directory_is_searched_unless_python_is_told_not_to(folder: Folder) -> None:
    arguments = ("launch", "job:main", "--n", 1, "--option", "preload=[]", "--dry-run")
    assert folder.replicas(*arguments).code == 0
    code = "import sys; from executors.cli import main; sys.exit(main())"
    safe = subprocess.run([sys.executable, "-P", "-c", code, *map(str, arguments)], cwd=folder.path, check=False)
    assert safe.returncode == 2


# The exit code


def outcome(rank: int, reason: Reason | None = None) -> Outcome:
    status = {None: ReplicaStatus.SUCCEEDED, "cancelled": ReplicaStatus.CANCELLED}.get(reason, ReplicaStatus.FAILED)
    return Outcome(rank, 0, status, reason)


@pytest.mark.parametrize(
    ("reasons", "interrupted", "code"),
    [
        ([None, None], False, 0),
        ([None, "exception"], False, 1),
        ([None, "timeout"], False, 124),
        (["signal", "timeout"], False, 1),
        (["lost", None], False, 1),
        (["cancelled", None], False, 130),
        (["cancelled", "exception", "timeout"], False, 130),
        (["exception"], True, 130),
        ([None], True, 130),
        ([None, "fenced"], False, 0),
    ],
)
def test_the_exit_code_is_the_first_that_applies(reasons: list[Reason | None], interrupted: bool, code: int) -> None:
    outcomes = [outcome(rank, reason) for rank, reason in enumerate(reasons)]
    assert exit_code(outcomes, interrupted=interrupted) == code


def test_the_summary_is_that_of_the_lowest_rank_that_succeeded_and_has_one() -> None:
    rows: list[tuple[ReplicaStatus, Any]] = [
        (ReplicaStatus.FAILED, {"summary": "of a failed rank"}),
        (ReplicaStatus.SUCCEEDED, {"loss": 1}),
        (ReplicaStatus.SUCCEEDED, {"summary": 3}),
        (ReplicaStatus.SUCCEEDED, {"summary": "this"}),
        (ReplicaStatus.SUCCEEDED, {"summary": "another"}),
    ]
    assert find_summary([Outcome(rank, 0, s, result=r) for rank, (s, r) in enumerate(rows)]) == "this"


# Options of backends


class Typed:
    """An executor's class, as far as its options go.

    Args:
        names: some names,
            over two lines.
        speed: how fast.
    """

    def __init__(  # type: ignore[no-untyped-def]
        self,
        names: Sequence[str],
        *,
        speed: float = 1,
        count: int | None = None,
        mode: Literal["a", "b"] = "a",
        labels: Mapping[str, str] | None = None,
        on: bool = False,
        anything: Any = None,
        untyped=None,
    ) -> None: ...


@pytest.mark.parametrize(
    ("option", "good", "bad"),
    [
        ("names", ["a"], "a"),
        ("names", [], [1]),
        ("speed", 2, "2"),
        ("speed", 0.5, True),
        ("count", None, 1.5),
        ("count", 3, "3"),
        ("mode", "b", "c"),
        ("labels", {"a": "b"}, ["a"]),
        ("on", True, 1),
    ],
)
def test_an_options_value_has_the_type_its_constructor_declares(option: str, good: Any, bad: Any) -> None:
    check_options("typed", Typed, {option: good, "anything": object(), "untyped": 3})
    with pytest.raises(UsageProblem, match=f"Option '{option}' of backend 'typed' takes"):
        check_options("typed", Typed, {option: bad})


def test_an_option_is_described_by_its_signature_and_its_docstring() -> None:
    options = {option.name: option for option in options_of(Typed)}
    assert options["names"].help == "some names, over two lines."
    assert options["names"].type_name == "Sequence[str]"
    assert options["mode"].type_name == "Literal['a', 'b']"
    assert options["untyped"].type_name == ""
    assert options_of(LocalProcessExecutor)[0].name == "preload"


# Words


def test_ranks_are_named_briefly() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
    assert name_ranks([0, 1]) == "ranks 0-1"


def test_times_are_named_for_people() -> None:
    assert [name_duration(s) for s in (-1, 0.84, 42.9, 185, 7800)] == ["0.0 s", "0.8 s", "42 s", "3:05", "2:10:00"]
    assert [name_age(s) for s in (0.4, 61, 7300, 200_000)] == ["0 s", "1 min", "2 h", "2 d"]
    assert [name_limit(s) for s in (None, 0.5, 90.0)] == ["no time limit", "time limit 0.5 s", "time limit 1:30"]
