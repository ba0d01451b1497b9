"""Fixtures and checks of all tests: each test has its own state directory, and fails if it leaves a process behind."""

from __future__ import annotations

import functools
import gc
import math
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from servers.hub.server import HubServer, hub_server
from servers.s3.server import CREDENTIALS, S3Server, running_server
from support.cli import JOB, Folder, HereInstead
from support.processes import MARK, all_pids, end, left_over

from executors import LocalProcessExecutor
from executors.patience import Waits, waits
from executors.restarts.lease import LeaseHolder
from executors.store import run_key

if TYPE_CHECKING:
    from servers.kubernetes.server import ApiServer
    from servers.modal.server import ModalServer
    from servers.slurm.cluster import Cluster
    from servers.slurm.commands import Commands
    from support.fake_jobs import Machines
    from support.third_party import PopenExecutor

os.environ["MODAL_CONFIG_PATH"] = os.devnull  # the SDK reads the user's settings when it is imported
os.environ[MARK] = str(os.getpid())  # every process that a test starts inherits it
for name in (
    "REPLICAS_RENDEZVOUS",
    "REPLICAS_PROFILE",
    "REPLICAS_CONFIG",
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
):
    os.environ.pop(name, None)
# `nohup make test &` starts us with signals that are ignored, and all processes of the tests would inherit that.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)
LIVE_NAMES = ("HF_TOKEN", "KUBECONFIG", "REPLICAS_LIVE_RENDEZVOUS")
LIVE = {name: os.environ[name] for name in LIVE_NAMES if os.environ.get(name)}
"""The variables that only tests marked `live` may use."""
SLOW_FIRST = (
    "contract/test_executor_contract_jobs.py",
    "contract/test_stores.py",
    "benchmarks/test_benchmarks_run.py",
    "jobs/test_job_launchers.py",
    "training/test_lightning.py",
    "training/test_hf_trainer.py",
    "docs/test_readme.py",
    "docs/test_pages.py",
    "local/test_hostile_bucket.py",
    "simulation/test_random_schedules.py",
    "training/test_numerics.py",
    "training/test_ends.py",
    "cli/test_cli_interrupts.py",
    "contract/test_job_service_contract.py",
    "local/test_standalone_worker.py",
    "jobs/test_job_endings.py",
    "jobs/test_money.py",
    "jobs/test_kept_jobs.py",
    "jobs/test_modal.py",
    "docs/test_site.py",
    "local/test_hangs.py",
    "training/test_stale_copies.py",
)
"""The slowest files, of the day and of the night. They run first, so that none is left to one process at the end."""
HERE = Path(__file__).parent


@functools.cache
def lines_of(name: str) -> frozenset[str]:
    """Return the lines of `night.txt` or `day.txt`, each as `local/test_disks.py::test_name` or `…::test_name[id]`."""
    return frozenset((HERE / name).read_text(encoding="utf-8").splitlines())


def is_of_the_night(test: str) -> bool:
    """Return True if only `make test-all` runs a test.

    `make test` has one scene for each promise, all contracts, and all quick tests. `night.txt` names a scene that
    takes more than about two seconds and shows a further side of a promise. `night.txt` also names a test that shows
    one promise for many parameters. `day.txt` then names the parameters that `make test` keeps.

    Args:
        test: The id of the test below `tests`, with its parameters.
    """
    night = lines_of("night.txt")
    return test in night or (test.partition("[")[0] in night and test not in lines_of("day.txt"))


# huggingface_hub reads these variables when it is imported. The tests must not use the user's settings or token.
for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING_FACE_", "HUGGINGFACE_"))]:
    os.environ.pop(name)
os.environ["KUBECONFIG"] = "/nonexistent/kubeconfig"
os.environ |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": "/nonexistent/huggingface"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_of_the_night(f"{item.path.relative_to(HERE)}::{item.nodeid.partition('::')[2]}"):
            item.add_marker(pytest.mark.slow)
    order = {str(HERE / file): number for number, file in enumerate(SLOW_FIRST)}
    items.sort(key=lambda item: order.get(str(item.path), len(order)))


def pytest_collection_finish() -> None:
    gc.freeze()  # imported objects are never garbage, and each search through them takes a tenth of a second


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private place for runs and settings, so that no test touches the user's own."""
    home = tmp_path / "state"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    return home


@pytest.fixture(autouse=True)
def _modules_of_a_test_go_with_it(tmp_path: Path) -> Iterator[None]:
    """Forget the modules from the test's own folder, because the next test may have another file of the same name."""
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(f"{tmp_path}/"):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_wait_of_the_test_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove all waits from this process, because a thread of an earlier test may wait for its store for minutes."""
    monkeypatch.setattr(waits, "_all", {})
    monkeypatch.setattr(waits, "_reported_at", -math.inf)
    monkeypatch.setattr(waits, "report", Waits().report)


@pytest.fixture(autouse=True)
def _no_key_of_the_test_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove all keys from this process, because tests use the same bucket and run ids, and a held key makes a run
    signed.
    """
    monkeypatch.setattr(run_key, "_held", {})


@pytest.fixture(autouse=True)
def _leases_end_with_their_test() -> Iterator[None]:
    """End the threads that renew leases: they would write into the bucket of a later test."""
    started: list[LeaseHolder] = []
    start = LeaseHolder.start

    def noted(holder: LeaseHolder) -> None:
        started.append(holder)
        start(holder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LeaseHolder, "start", noted)
        yield
    for holder in started:
        holder.end()


@pytest.fixture(autouse=True)
def _nothing_left_running(state_home: Path) -> Iterator[None]:
    """Fail a test that leaves a process behind, and end that process."""
    before = all_pids()
    yield
    if survivors := left_over(before, within_s=10.0):
        end(survivors)
        pytest.fail("left running: " + "; ".join(f"{pid}: {command}" for pid, command in survivors.items()))


@pytest.fixture(scope="session")
def _small_server() -> Iterator[S3Server]:
    with running_server() as server:
        yield server


@pytest.fixture(scope="session")
def _moto_server() -> Iterator[S3Server]:
    with running_server(module="servers.s3.moto_behind_faults") as server:
        yield server


@pytest.fixture
def s3_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the credentials that the servers accept, and hide the user's own credentials."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "no-such-file"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def s3(_small_server: S3Server, s3_credentials: None) -> S3Server:
    """One empty bucket that answers at once. Its server is shared by all tests, one after the other."""
    _small_server.empty()
    return _small_server


@pytest.fixture
def moto(_moto_server: S3Server, s3_credentials: None) -> S3Server:
    """One empty bucket at moto, which implements more of S3 and needs milliseconds for each request."""
    _moto_server.empty()
    return _moto_server


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """A Hugging Face Hub with no jobs yet. All its jobs are ended at the end of the test."""
    with hub_server() as server:
        yield server


@pytest.fixture
def hf(hub: HubServer, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The Hub, with everything that a user needs: a token, a rendezvous, and a folder with `job.py` to launch from."""
    for name, value in {**hub.environment, "REPLICAS_RENDEZVOUS": s3.url("runs")}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path / "work")
    return hub


@pytest.fixture
def quick_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the pauses between tries short."""
    monkeypatch.setattr("executors.backends.jobs.service.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("executors.backends.jobs.service.LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr("executors.backends.jobs.job_starter.LOOK_PAUSE_S", 0.01)


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    """The machines that a `FakeExecutor` of this test runs its jobs on, and a folder with `job.py` to launch from."""
    from support.fake_jobs import FakeExecutor, Machines

    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path / "work")
    made = Machines(tmp_path / "machines")
    monkeypatch.setattr(FakeExecutor, "machines", made, raising=False)
    yield made
    made.close()


@pytest.fixture
def modal_cloud() -> Iterator[ModalServer]:
    """A Modal control plane for this test, which the SDK of this process and its children uses."""
    from servers.modal.server import modal_server

    with modal_server() as server, server.used_by_the_sdk():
        yield server


@pytest.fixture
def modal_runs(modal_cloud: ModalServer, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModalServer:
    """Everything that `launch("modal", …)` needs: Modal, a bucket, and an empty workspace."""
    monkeypatch.setenv("REPLICAS_RENDEZVOUS", s3.url("runs"))
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    monkeypatch.chdir(workspace)
    return modal_cloud


@pytest.fixture(scope="session")
def _slurm_cluster() -> Iterator[Cluster]:
    from servers.slurm.cluster import INSTALL, missing_programs, running_cluster

    if missing := missing_programs():
        pytest.skip(f"there is no {missing[0]}. On Debian: {INSTALL}")
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def slurm(_slurm_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A Slurm cluster with no jobs, and a folder with `job.py` to launch from. Its jobs use `tmp_path / "scratch"`.

    Its daemons are shared by all tests, one after the other.
    """
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "SQUEUE_", "SCANCEL_"))]:
        monkeypatch.delenv(name)
    for name, value in {**_slurm_cluster.environment, "TMPDIR": str(tmp_path / "scratch")}.items():
        monkeypatch.setenv(name, value)
    for name in ("work", "scratch"):
        (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / "work" / "job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path / "work")
    yield _slurm_cluster
    _slurm_cluster.end_jobs()


@pytest.fixture
def slurm_commands(slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """The calls of Slurm's commands in this test."""
    from servers.slurm.commands import Commands

    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return Commands(tmp_path / "bin")


@pytest.fixture
def k8s(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """An API server for this test, with everything that a user needs: a kubeconfig, a rendezvous, and a folder."""
    from servers.kubernetes.server import api_server

    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path / "work")
    with api_server() as server:
        monkeypatch.setenv("KUBECONFIG", server.kubeconfig)
        monkeypatch.setenv("REPLICAS_RENDEZVOUS", s3.url("runs"))
        yield server


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """A user's folder with `job.py`, which is also this process's working directory."""
    (tmp_path / "work").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.syspath_prepend(tmp_path / "work")
    return Folder(tmp_path / "work")


@pytest.fixture
def here(folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> HereInstead:
    return HereInstead(folder, monkeypatch, capsys)


@pytest.fixture
def local() -> LocalProcessExecutor:
    """The local executor, for work without torch. Its zygote is shared by all tests."""
    return LocalProcessExecutor(preload=(), term_grace_s=0.5)


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A control group with 128 MiB of memory."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root, f"replicas-test-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / limit).exists():
            (group / limit).write_text(str(128 << 20))
            yield group
            group.rmdir()
            return
        group.rmdir()
    pytest.skip("only root can create a control group for memory, and only if the controller is mounted")


@pytest.fixture
def third_party(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PopenExecutor]:
    """A third-party executor, whose processes end with the test."""
    from support.third_party import PopenExecutor

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    started: list[Any] = []
    launch_replicas = PopenExecutor.launch_replicas

    @functools.wraps(launch_replicas)
    def remember(*args: Any, **kwargs: Any) -> Any:
        started.extend(tickets := launch_replicas(*args, **kwargs))
        return tickets

    monkeypatch.setattr(PopenExecutor, "launch_replicas", remember)
    yield PopenExecutor()
    for ticket in started:
        ticket.process.kill()
        ticket.process.wait()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium: apt-get install --no-install-recommends chromium")
    with playwright.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield made
        made.close()
