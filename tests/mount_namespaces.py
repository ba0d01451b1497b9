"""Playing a scene in a mount namespace of its own, where it may mount what it likes."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import scenes_on_odd_disks

from executors.testing.processes import environment

NAMESPACE = ["unshare", "--mount", "--map-root-user", "--ipc"]


@functools.cache
def namespaces_are_to_be_had() -> bool:
    probe = [*NAMESPACE, "mount", "-t", "tmpfs", "none", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(probe, capture_output=True).returncode == 0


def play(scene: str, root: Path, *prefix: str, script: str = scenes_on_odd_disks.__file__) -> None:
    command = [*prefix, sys.executable, script, scene, str(root)]
    played = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert played.returncode == 0, played.stderr


def play_in_namespace(scene: str, root: Path, script: str = scenes_on_odd_disks.__file__) -> None:
    if not namespaces_are_to_be_had():
        pytest.skip("mounting needs unshare and user namespaces, or root")
    play(scene, root, *NAMESPACE, script=script)
