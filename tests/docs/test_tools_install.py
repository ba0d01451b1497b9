"""`uv tool install` and `pipx install` bring a working command from a checkout, as the page on installation says."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from support.processes import MARK

ROOT = Path(__file__).parents[2]
INSTALL = {"uv": ("tool", "install", "--quiet", "--python", sys.executable), "pipx": ("install", "--quiet")}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(*command: object, environ: dict[str, str], cwd: Path) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("tool", INSTALL)
def test_a_tool_installs_the_command_from_a_checkout(tool: str, tmp_path: Path) -> None:
    venv.create(tmp_path / "tool", symlinks=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", tmp_path / "tool" / "bin" / "python"]
    run(*pip, "install", "--no-compile", tool, environ=dict(os.environ), cwd=ROOT)
    checkout = tmp_path / "replicas"
    run("git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", checkout, environ=dict(os.environ), cwd=tmp_path)

    home, programs = tmp_path / "home", tmp_path / "bin"
    home.mkdir()
    own = {"HOME": str(home), "UV_TOOL_BIN_DIR": str(programs), "PIPX_BIN_DIR": str(programs)}
    own |= {"UV_TOOL_DIR": str(home / "uv"), "PIPX_HOME": str(home / "pipx"), "PIPX_DEFAULT_PYTHON": sys.executable}
    run(tmp_path / "tool" / "bin" / tool, *INSTALL[tool], checkout, environ={**os.environ, **own}, cwd=tmp_path)

    alone = {"HOME": str(home), "PATH": "/usr/bin:/bin", MARK: os.environ[MARK]}
    assert run(programs / "replicas", "--version", environ=alone, cwd=home).startswith("replicas ")
    (home / "job.py").write_text("def main():\n    return 'done'\n")
    assert "done" in run(programs / "replicas", "launch", "job.py:main", "--n", "1", environ=alone, cwd=home)
