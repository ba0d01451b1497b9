"""Stores and runs on a disk that is full, read-only, another user's, or unable to link: real ones, mounted apart."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import scenes_on_disks

from executors.testing.helpers import environment

NAMESPACE = ("unshare", "--mount", "--map-root-user", "--ipc")
STORES = ("full_disk", "full_disk_without_anonymous_files", "out_of_inodes", "full_from_the_start", "read_only")
RUNS = ("full_for_a_while", "full_for_good", "full_before_a_launch", "full_while_a_rank_dies", "full_logs")


def play(scene: str, root: Path, *prefix: str) -> None:
    command = [*prefix, sys.executable, scenes_on_disks.__file__, scene, str(root)]
    played = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert played.returncode == 0, played.stderr


@functools.cache
def has_namespaces() -> bool:
    probe = [*NAMESPACE, "mount", "-t", "tmpfs", "none", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(probe, capture_output=True).returncode == 0


@pytest.mark.parametrize("scene", [*STORES, "no_hard_links", *RUNS])
def test_a_disk_of_another_kind_is_used_or_refused_with_the_reason(scene: str, tmp_path: Path) -> None:
    if not has_namespaces():
        pytest.skip("mounting needs unshare and user namespaces, or root")
    play(scene, tmp_path / "a disk, 100% ä", *NAMESPACE)


def test_a_file_size_limit_is_a_clear_error_and_leaves_no_half_object(tmp_path: Path) -> None:
    play("file_size_limit", tmp_path / "disk")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder whose parents every user may enter."""
    if os.geteuid() != 0:
        pytest.skip("only root can give up rights")
    root = Path("/tmp") / f"replicas-test-{os.getpid()}"
    yield root
    shutil.rmtree(root, ignore_errors=True)


def test_another_users_directory_can_be_read_and_the_error_of_a_write_names_the_reason(shared: Path) -> None:
    play("of_another_user", shared)


@pytest.mark.parametrize("scene", ["two_users_in_turn", "two_users_in_turn_without_anonymous_files"])
def test_two_users_write_to_one_directory_in_turn(scene: str, shared: Path) -> None:
    play(scene, shared)
