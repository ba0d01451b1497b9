"""Tests replicas that share a bucket and have no network between them."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from executors.testing.helpers import environment

SCENE = Path(__file__).parents[1] / "support" / "scene_without_routes.py"
NAMESPACE = ["unshare", "--net", "--mount", "--map-root-user"]


@functools.cache
def what_is_missing() -> str:
    """Return the programs or rights that this machine lacks for the test. Empty: it lacks none."""
    for program, package in (("ip", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(program) is None:
            return f"there is no command {program!r}: apt-get install {package}"
    probe = [*NAMESPACE, "sh", "-ec", "mount -t tmpfs none /run; ip netns add probe; ip link add probe0 type veth"]
    tried = subprocess.run(probe, capture_output=True, text=True)
    return f"no network namespaces, not even in a user namespace: {tried.stderr}" if tried.returncode else ""


@pytest.mark.timeout(300)
def test_four_replicas_that_cannot_reach_each_other_train_together_and_one_is_killed_and_comes_back() -> None:
    if missing := what_is_missing():
        pytest.skip(missing)
    command = [*NAMESPACE, sys.executable, str(SCENE)]
    played = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert played.returncode == 0, played.stderr
