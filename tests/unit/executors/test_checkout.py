"""Tests the git data of the folder of a launch, and that no launch waits long for git."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
from support.git import git, repository

from executors import launch
from executors.run.run import view_of
from executors.shipping.checkout import Checkout, GitQuery
from executors.testing import eventually


def test_the_commit_is_recorded_and_whether_the_files_differ_from_it(tmp_path: Path) -> None:
    root = repository(tmp_path / "work", {"train.py": "x = 1"})
    commit = git(root, "rev-parse", "HEAD")
    for is_dirty in (False, True):
        with closing(GitQuery(root)) as look:
            assert look.result() == Checkout(commit, is_dirty)
        (root / "train.py").write_text("x = 2")


def test_a_folder_that_the_repository_ignores_has_no_commit(tmp_path: Path) -> None:
    root = repository(tmp_path / "work", {"a.py": "", ".gitignore": "scratch/"})
    (root / "scratch" / "inner").mkdir(parents=True)
    for folder in (root / "scratch", root / "scratch" / "inner"):
        with closing(GitQuery(folder)) as look:
            assert look.result() == Checkout()


def test_outside_a_repository_and_without_git_nothing_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (os.environ["PATH"], str(tmp_path)):
        monkeypatch.setenv("PATH", path)
        with closing(GitQuery(tmp_path)) as look:
            assert look.result().about is None


def state_of(pid: str) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_git_that_takes_long_is_not_waited_for_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, pids = tmp_path / "git", tmp_path / "pids"
    answers = "[ $1 = rev-parse ] && echo abc && exit\n[ $1 = check-ignore ] && exit 1\n"
    slow.write_text(f"#!/bin/sh\necho $$ >> {pids}\n{answers}exec sleep 600\n")
    slow.chmod(0o755)
    pids.touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with closing(GitQuery(tmp_path)) as look:
        eventually(
            lambda: [state_of(pid) for pid in pids.read_text().split()].count("Z") == 2, "both git processes have ended"
        )
        assert look.result() == Checkout("abc", None)
    for pid in pids.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_a_run_on_this_machine_records_the_commit_that_was_checked_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = repository(tmp_path / "work", {"train.py": "def main(): pass"})
    monkeypatch.chdir(root)
    run = launch("inline", "train.py:main", 1)
    assert view_of(run).record.code == {"commit": git(root, "rev-parse", "HEAD"), "dirty": False}
