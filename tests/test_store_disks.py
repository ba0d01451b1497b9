"""A directory on a disk that is full, read-only, somebody else's, or unable to link: real ones, mounted apart."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from mount_namespaces import play, play_in_namespace


def test_a_full_disk_is_a_clear_error_and_leaves_no_half_object(tmp_path: Path) -> None:
    play_in_namespace("full_disk", tmp_path / "disk")


def test_a_full_disk_without_anonymous_files_leaves_no_half_object(tmp_path: Path) -> None:
    play_in_namespace("full_disk_without_anonymous_files", tmp_path / "disk")


def test_a_disk_without_room_for_names_is_a_clear_error(tmp_path: Path) -> None:
    play_in_namespace("out_of_inodes", tmp_path / "disk")


def test_a_disk_that_is_full_from_the_start_is_called_full_and_not_unsafe(tmp_path: Path) -> None:
    play_in_namespace("full_from_the_start", tmp_path / "disk")


def test_a_file_size_limit_is_a_clear_error_and_leaves_no_half_object(tmp_path: Path) -> None:
    play("file_size_limit", tmp_path / "disk")


def test_a_file_system_without_hard_links_is_refused_with_path_and_kind(tmp_path: Path) -> None:
    play_in_namespace("no_hard_links", tmp_path / "a disk, 100% ä")


def test_a_read_only_directory_can_be_read(tmp_path: Path) -> None:
    play_in_namespace("read_only", tmp_path / "disk")


def test_somebody_elses_directory_can_be_read_and_says_what_it_forbids() -> None:
    if os.geteuid() != 0:
        pytest.skip("giving up rights needs them")
    root = Path("/tmp") / f"replicas-test-{os.getpid()}"  # a place whose parents everybody may enter
    try:
        play("somebody_elses", root)
    finally:
        shutil.rmtree(root, ignore_errors=True)
