"""The published package works by itself: it is built from a copy of the files in git, and installed into an empty
environment.

Commands run in an empty folder with an empty HOME, so that nothing of the checkout is found. `make package` runs this,
and leaves wheel and sdist in `dist/`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.processes import MARK
from test_readme import PYTHON, TEXT, block_with

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = sorted(PROJECT["optional-dependencies"].keys() - {"all", "dev"})
PARTS = {
    "s3": "boto3, executors.store.s3.store",
    "hf-trainer": "diloco.trainers.hf",
    "diloco": "diloco.outer",
    "lightning": "diloco.trainers.lightning",
    "notify": "apprise",
    "dashboard": "starlette, uvicorn, executors.dashboard.server",
    "tensorboard": "tensorboard.summary.writer.event_file_writer, executors.view.report.tensorboard",
}
"""The purpose of each extra that is not for a backend."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Environment:
    """A separate Python environment. Its pip installs the same packages as the pip of this one, and it sees the
    packages of another environment.
    """

    def __init__(self, folder: Path, below: Environment | None = None) -> None:
        self.folder = folder
        venv.create(folder, symlinks=True)
        (self.packages,) = folder.glob("lib/python*/site-packages")
        if below is not None:
            (self.packages / "below.pth").write_text(f"{below.packages}\n")

    def install(self, *requirements: object) -> None:
        pip = [sys.executable, "-m", "pip", "--quiet", "--python", self.folder / "bin" / "python"]
        run(
            [*pip, "install", "--no-compile", "--constraint", ROOT / "constraints.txt", *requirements],
            ROOT,
            dict(os.environ),
        )

    def run(self, folder: Path, *command: str) -> str:
        """Run a command of this environment as a user without any other setup."""
        home = folder / "home"
        home.mkdir(exist_ok=True)
        path = os.pathsep.join([str(self.folder / "bin"), "/usr/bin", "/bin"])
        program, *arguments = command
        environ = {"PATH": path, "HOME": str(home), MARK: os.environ[MARK]}
        return run([self.folder / "bin" / program, *arguments], folder, environ)


def run(command: Sequence[object], folder: Path, environ: dict[str, str]) -> str:
    done = subprocess.run(list(map(str, command)), cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("package")


@pytest.fixture(scope="module")
def wheel(scratch: Path) -> Path:
    """The wheel, built from the sdist alone; both stay in $REPLICAS_DIST."""
    dist = Path(os.environ.get("REPLICAS_DIST") or scratch / "dist").absolute()
    builder = Environment(scratch / "builder")
    builder.install(*tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"])
    hatchling = [builder.folder / "bin" / "hatchling", "build", "--directory", dist]
    run([*hatchling, "--target", "sdist"], ROOT, dict(os.environ))
    name = f"{PROJECT['name'].replace('-', '_')}-{PROJECT['version']}"
    with tarfile.open(dist / f"{name}.tar.gz") as sdist:
        sdist.extractall(scratch / "sdist", filter="data")
    run([*hatchling, "--target", "wheel"], scratch / "sdist" / name, dict(os.environ))
    return dist / f"{name}-py3-none-any.whl"


@pytest.fixture(scope="module")
def installed(scratch: Path, wheel: Path) -> Environment:
    """An environment with the wheel and its dependencies."""
    environment = Environment(scratch / "environment")
    environment.install(wheel)
    return environment


def test_the_wheel_holds_the_two_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"executors", "diloco"}
    tracked = subprocess.run(["git", "ls-files", "executors", "diloco"], cwd=ROOT, capture_output=True, check=True)
    assert set(tracked.stdout.decode().split()) <= names


@pytest.fixture(scope="module")
def training(scratch: Path, wheel: Path, installed: Environment) -> Environment:
    """An environment that also has the packages of training."""
    environment = Environment(scratch / "training", below=installed)
    environment.install(f"{wheel}[diloco]")
    return environment


def test_a_machine_that_only_launches_needs_no_torch(installed: Environment, tmp_path: Path) -> None:
    assert not (installed.packages / "torch").exists()
    tried = "import diloco\ntry:\n    diloco.DiLoCo\nexcept ImportError as error:\n    print(error)"
    message = installed.run(tmp_path, "python", "-c", tried)
    assert "DiLoCo needs the package" in message
    assert "'torch>=" in message


def test_the_command_helps_and_the_examples_of_the_readme_run(installed: Environment, tmp_path: Path) -> None:
    assert "launch" in installed.run(tmp_path, "replicas", "--help")
    assert "--backend" in installed.run(tmp_path, "replicas", "launch", "--help")
    where = installed.run(tmp_path, "python", "-c", "import executors, diloco; print(executors.__file__)")
    assert where.startswith(str(installed.packages))
    (tmp_path / "script.py").write_text(block_with(PYTHON, "print(launch("))
    assert installed.run(tmp_path, "python", "script.py") == block_with(TEXT, "{'rank': 3, 'loss': 0.005}]")


def test_two_replicas_of_the_demo_train_one_model(training: Environment, tmp_path: Path) -> None:
    told = training.run(tmp_path, "python", "-m", "executors.cli", "launch", "--n", "2", "--arg", "steps=40")
    assert "2 replicas trained one transformer" in told


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_brings_what_its_part_needs(
    installed: Environment, wheel: Path, extra: str, scratch: Path, tmp_path: Path
) -> None:
    environment = Environment(scratch / extra, below=installed)
    environment.install(f"{wheel}[{extra}]")
    if extra in PARTS:
        environment.run(tmp_path, "python", "-c", f"import {PARTS[extra]}")
    else:
        assert problems(environment, tmp_path)[extra] is None


def test_all_are_all_extras() -> None:
    (everything,) = PROJECT["optional-dependencies"]["all"]
    assert sorted(everything.partition("[")[2].rstrip("]").split(",")) == EXTRAS


def test_without_extras_the_error_names_the_missing_package_and_the_command_that_installs_it(
    installed: Environment, tmp_path: Path
) -> None:
    found = problems(installed, tmp_path)
    assert found["local"] is None
    for backend in ("modal", "hf"):
        (package, *_) = PROJECT["optional-dependencies"][backend]
        assert f"pip install '{package.partition('>')[0].replace('_', '-')}" in str(found[backend])


def problems(environment: Environment, folder: Path) -> dict[str, str | None]:
    """The reason why each backend cannot be used."""
    rows = json.loads(environment.run(folder, "python", "-m", "executors.cli", "backends", "--json"))
    return {row["name"]: row["problem"] for row in rows["backends"]}
