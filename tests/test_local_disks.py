"""Local runs on a full disk: a real one, mounted apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import scenes_on_full_disks
from mount_namespaces import play_in_namespace

SLOW = pytest.param("full_for_good", marks=pytest.mark.slow)  # worker and supervisor each try for ten seconds


@pytest.mark.parametrize("scene", ["full_for_a_while", SLOW, "full_from_the_start", "full_logs"])
def test_a_full_disk_ends_no_run_in_silence(scene: str, tmp_path: Path) -> None:
    play_in_namespace(scene, tmp_path / "disk", script=scenes_on_full_disks.__file__)
