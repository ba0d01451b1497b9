"""A real Slurm on loopback: a controller, munge, and four nodes with two simulated GPUs each, in one folder.

The partition `main` takes nodes from `low`, whose jobs then have 3 s to end. Jobs in `short` have half an hour. There
is no database of accounts: a script refuses all accounts except `known`, with Slurm's own error. It needs Debian's
packages slurmctld, slurmd, slurm-client and munge.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from support.processes import MARK, command_of, parent_of

from servers.isolation.orphans import end_all_after_us, end_all_in, forget

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "sinfo")
INSTALL = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
NODES = ("n0", "n1", "n2", "n3")
START_LIMIT_S = 60.0
JOBS_LIMIT_S = 15.0
TRIES = 3  # tries to start, because another process may take a port before Slurm does
SETTINGS = {"MinJobAge": "300"}
"""Settings that a test may change while the cluster runs."""
CONF = """
ClusterName=replicas
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
KillWait=5
ReturnToService=2
SlurmdTimeout={node_limit_s}
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{settings}
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=short Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF MaxTime=30
PartitionName=low Nodes=ALL State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=3
JobSubmitPlugins=lua
"""
SUBMIT = """
function slurm_job_submit(job, partitions, user)
    if job.account ~= nil and job.account ~= "known" then
        return slurm.ESLURM_INVALID_ACCOUNT
    end
    return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, user)
    return slurm.SUCCESS
end
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 Boards=1 SocketsPerBoard=1 "
    "CoresPerSocket=8 ThreadsPerCore=1 RealMemory=4000 Gres=gpu:h100:2 State=UNKNOWN"
)


def missing_programs() -> list[str]:
    return [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]


def free_ports(n: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(n)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


class Cluster:
    """The daemons of a cluster, and their folder. It has one method for each thing that a test can do to a cluster.

    Args:
        folder: the folder for configuration, state and logs.
        node_limit_s: how long a node may be silent until it counts as dead.
    """

    def __init__(self, folder: Path, node_limit_s: int = 10) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self.settings = dict(SETTINGS)
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._node_limit_s = node_limit_s
        self._ports = free_ports(1 + len(NODES))
        folder.chmod(0o711)  # munge refuses to start unless every user can reach its socket
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o600)
        for number in range(2):
            os.mknod(
                folder / f"gpu{number}", stat.S_IFCHR, os.makedev(1, 3)
            )  # Slurm ignores a file that is not a device
        for name in NODES:
            (folder / name).mkdir()
        (folder / "gres.conf").write_text(f"Name=gpu Type=h100 File={folder}/gpu[0-1]\n")
        (folder / "job_submit.lua").write_text(SUBMIT)
        (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        self._write()

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which Slurm's commands ask this cluster."""
        return {"SLURM_CONF": str(self.conf), "PATH": PATH}

    def run(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        """Return the output of a command of Slurm. Raises CalledProcessError if the command fails."""
        environment = {**os.environ, **self.environment, **(env or {})}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed ({done.returncode}): {done.stderr.strip()}")
        return done.stdout

    def start(self) -> None:
        """Start all daemons, and wait until every node is idle."""
        end_all_after_us(self.folder)
        file = {name: f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")}
        self._start("munged", "munged", "--foreground", f"--socket={self.folder}/munge.socket", *file.values())
        self._wait_for((self.folder / "munge.socket").exists, "munge")
        self._start("slurmctld", "slurmctld", "-D", "-i", "-f", str(self.conf))
        for name in NODES:
            self.start_node(name)
        self._wait_for(lambda: self._states() == {"idle"}, "its nodes")

    def jobs(self) -> list[str]:
        """Return all jobs that Slurm knows, also those that have ended."""
        return self.run("squeue", "--noheader", "--array", "--states=all", "--format=%i").split()

    def start_node(self, name: str) -> None:
        self._start(name, "slurmd", "-D", "-f", str(self.conf), "-N", name)

    def kill_node(self, name: str) -> None:
        """Kill a node with all its processes, as a power cut does."""
        daemon = self.daemons.pop(name)
        daemon.kill()
        daemon.wait()
        works = [pid for pid, variables in self._processes() if variables["SLURMD_NODENAME"] == name]
        steps = {parent for pid in works if (parent := parent_of(pid)) and "slurmstepd" in command_of(parent)}
        _kill(*steps, *works)  # in this order, so that no daemon reports the end of a killed process

    def kill_job(self, job: str) -> None:
        """Kill all processes of a job at once. `scancel` would send SIGTERM first."""
        array, _, task = job.partition("_")
        ids = {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": task}
        _kill(*(pid for pid, variables in self._processes() if ids.items() <= variables.items()))

    def evict(self, job: str) -> None:
        """Preempt a job of the partition `low`, by a job of `main` that ends at once."""
        node = self.run("squeue", "--noheader", f"--jobs={job}", "--format=%N").strip()
        self.run("sbatch", f"--nodelist={node}", "--exclusive", "--output=/dev/null", "--chdir=/", "--wrap=true")

    @contextlib.contextmanager
    def stopped_controller(self) -> Iterator[None]:
        """Stop the controller during the block. It answers the requests of the block afterwards."""
        self.daemons["slurmctld"].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.daemons["slurmctld"].send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def configured(self, **settings: str) -> Iterator[None]:
        """Change settings of the cluster within the block."""
        before = dict(self.settings)
        self._reconfigure({**before, **settings})
        try:
            yield
        finally:
            self._reconfigure(before)

    def end_jobs(self) -> None:
        """End all jobs, and wait until no job runs."""
        if self.run("squeue", "--noheader"):
            self.run("scancel", "--me", "--quiet")
            self._wait_for(lambda: not self.run("squeue", "--noheader"), "the end of the jobs", JOBS_LIMIT_S)

    def stop(self) -> None:
        if "slurmctld" in self.daemons:
            with contextlib.suppress(RuntimeError, TimeoutError):
                self.end_jobs()
        for daemon in self.daemons.values():
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        end_all_in(self.folder)
        forget(self.folder)

    def _write(self) -> None:
        host = socket.gethostname().partition(".")[0]
        controller, *ports = self._ports
        self.conf.write_text(
            CONF.format(
                folder=self.folder,
                host=host,
                port=controller,
                user=getpass.getuser(),
                node_limit_s=self._node_limit_s,
                settings="\n".join(f"{name}={value}" for name, value in self.settings.items()),
                nodes="\n".join(
                    NODE.format(name=name, host=host, port=port) for name, port in zip(NODES, ports, strict=True)
                ),
            )
        )

    def _reconfigure(self, settings: dict[str, str]) -> None:
        self.settings = settings
        self._write()
        self.run("scontrol", "reconfigure")

    def _start(self, name: str, *command: str) -> None:
        # The helper finds orphans by their HOME, so a node that a test starts again is ended, too.
        environment = {**os.environ, **self.environment, "HOME": str(self.folder)}
        environment.pop(MARK, None)
        with (self.folder / f"{name}.out").open("wb") as log:
            self.daemons[name] = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _processes(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Yield the pids of this cluster's jobs, with their variables."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                pairs = (pair.partition(b"=") for pair in (folder / "environ").read_bytes().split(b"\0"))
                variables = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
                if variables.get("SLURM_CONF") == str(self.conf) and "SLURMD_NODENAME" in variables:
                    yield int(folder.name), variables

    def _states(self) -> set[str]:
        with contextlib.suppress(RuntimeError):
            return set(self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T").split())
        return set()

    def _wait_for(self, condition: Callable[[], bool], what: str, limit_s: float = START_LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            for name, daemon in self.daemons.items():
                if daemon.poll() is not None:
                    raise RuntimeError(f"{name} ended with {daemon.returncode}. {self._logs(name)}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"Waited {limit_s:g} s for {what}. {self._logs('slurmctld')}")
            time.sleep(0.05)

    def _logs(self, name: str) -> str:
        logs = [self.folder / f"{name}.{kind}" for kind in ("out", "log")]
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in logs if log.exists())


def _kill(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Start a cluster in a new folder. The cluster ends with the block, or with this process."""
    for tries_left in reversed(range(TRIES)):
        with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True) as folder:
            cluster = Cluster(Path(folder))
            try:
                try:
                    cluster.start()
                except RuntimeError:
                    if tries_left:
                        continue
                    raise
                yield cluster
                return
            finally:
                cluster.stop()
