"""Launching: the time from a command until all replicas have started (L1 to L6)."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .gate import Footprint, Gate, footprint
from .harness import Comparison, Options, interleave

HERE = Path(__file__).parent
MARK = "REPLICAS_BENCHMARK"
PATIENCE_S = 120.0


TRANSFORMERS = "from transformers import Trainer, TrainingArguments"
# modules that are about as heavy as torch, and always installed
STAND_IN = "import torch.distributed.fsdp\nimport torch._inductor.compile_fx"
HEAVY = """
import sys
import torch
{imports}

sys.path.insert(0, {here!r})
import replica_tasks

def first_line(arrivals, release):
    print("up", flush=True)
    replica_tasks.come_up(arrivals, release)

if __name__ == "__main__":
    first_line(*sys.argv[2:])
"""
MEMORY_MIB = {"come_up": 8, "first_line": 200, "first_step": 250}
"""The memory of one replica with the launcher that needs the most memory, rounded up."""


@dataclass(frozen=True)
class Case:
    """The number of replicas and their task."""

    n: int
    stage: str
    file: Path = HERE / "replica_tasks.py"

    def use_memory(self) -> None:
        """Use and free the memory that the launch is going to take.

        In a virtual machine, the first use of a page may wait for the host for longer than a whole launch. Pages that
        stay free go back to the host. So without this, chance would decide which of two launchers pays for the pages.
        """
        size = self.n * MEMORY_MIB[self.stage] << 20
        subprocess.run([sys.executable, "-c", f"b = bytearray({size}); b[::4096] = b'1' * len(b[::4096])"], check=True)


@dataclass(frozen=True)
class Launched:
    """One launch, measured when its last replica has arrived."""

    seconds: float
    footprint: Footprint


def command(case: Case, method: str, gate: Gate, preload: tuple[str, ...] = ()) -> list[str]:
    """Return the command that launches a case by one method."""
    paths = [gate.arrivals, gate.release_path]
    if method == "torchrun":
        runner = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.n}"]
        return [sys.executable, *runner, str(case.file), case.stage, *paths]
    return [sys.executable, str(HERE / "launchers.py"), method, case.stage, str(case.n), *paths, *preload]


def launch_command(case: Case, method: str, preload: tuple[str, ...] = ()) -> Launched:
    """Start a command, wait for its replicas, and release them."""
    with tempfile.TemporaryFile() as said, Gate() as gate:
        case.use_memory()
        mark = f"{MARK}={secrets.token_hex(8)}"
        environment = {**os.environ, **dict([mark.split("=")])}
        # installed packages are compiled, and so is the standard library
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        started_at = time.monotonic()
        process = subprocess.Popen(
            command(case, method, gate, preload), env=environment, stdout=said, stderr=said, start_new_session=True
        )
        pidfd = os.pidfd_open(process.pid)
        try:
            arrived_at = gate.last_arrival_s(case.n, within_s=PATIENCE_S, give_up_when_ready=pidfd)
            used = footprint(mark)
            gate.release()
            if code := process.wait(PATIENCE_S):
                raise RuntimeError(f"{method} ended with exit code {code}.")
            gate.wait_until_gone(PATIENCE_S)
        except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
            said.seek(0)
            error.add_note(said.read().decode(errors="replace")[-4000:])
            raise
        finally:
            os.close(pidfd)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Launched(arrived_at - started_at, used)


def launch_here(case: Case, preload: tuple[str, ...] | Literal["auto"]) -> float:
    """Launch from this process, and return the seconds from the call to the last arrival."""
    from executors import LocalProcessExecutor, launch

    with Gate() as gate:
        case.use_memory()
        started_at = time.monotonic()
        run = launch(
            LocalProcessExecutor(preload=preload),
            f"{case.file}:{case.stage}",
            case.n,
            args={"arrivals": gate.arrivals, "release": gate.release_path},
        )
        arrived_at = gate.last_arrival_s(case.n, within_s=PATIENCE_S)
        gate.release()
        run.results()
        gate.wait_until_gone(PATIENCE_S)
    return arrived_at - started_at


def scratch_folder(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """Return a folder for the files of replicas, which is deleted at the end.

    A supervisor may still write when its launcher has all results.
    """
    return tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)


@contextlib.contextmanager
def state_of_its_own() -> Iterator[None]:
    """Keep the runs of this process, and of the commands it starts, out of the user's list.

    They are deleted at the end, and not after each repetition. ext4 examines every inode that was freed in the last
    minutes before it gives out another one. So the deletion of one repetition's files would take half of the time of
    the next repetition.
    """
    before = os.environ.get("XDG_STATE_HOME")
    with scratch_folder("benchmark-state-") as home:
        os.environ["XDG_STATE_HOME"] = home
        try:
            yield
        finally:
            if before is None:
                del os.environ["XDG_STATE_HOME"]
            else:
                os.environ["XDG_STATE_HOME"] = before


def default_preload() -> tuple[str, ...]:
    from executors import LocalProcessExecutor

    return LocalProcessExecutor().preload


def first_line(options: Options) -> list[Comparison]:
    """L1, L3, L4: replicas to their first line after `import torch`."""
    case = Case(1 if options.quick else 8, "first_line")
    lean, usual = ("torch",), default_preload()
    ours, ours_usual, again = f"replicas, preload={lean}", "replicas, default preload", "replicas, second launch"
    used: dict[str, list[Footprint]] = {}

    def measure(name: str, method: str, preload: tuple[str, ...] = ()) -> float:
        launched = launch_command(case, method, preload)
        used.setdefault(name, []).append(launched.footprint)
        return launched.seconds

    with state_of_its_own():
        launch_here(case, usual)  # the first launch, which L3 does not count
        samples = interleave(
            {
                "torchrun": lambda: measure("torchrun", "torchrun"),
                ours: lambda: measure(ours, "replicas", lean),
                again: lambda: launch_here(case, usual),
                ours_usual: lambda: measure(ours_usual, "replicas", usual),
                "multiprocessing spawn": lambda: measure("multiprocessing spawn", "spawn"),
            },
            options.repetitions(4),
        )
    second = {name: samples[name] for name in ("torchrun", again)}
    del samples[again]
    what = f"{case.n} replicas up"
    return [
        Comparison("L1", f"command start to {what}", "s", samples, "torchrun", {ours: 0.25}),
        Comparison("L3", f"second launch() in a live process to {what}", "s", second, "torchrun", {again: 0.03}),
        Comparison(
            "L4",
            f"processor time until {what}",
            "s",
            {name: [each.cpu_s for each in found] for name, found in used.items()},
            "torchrun",
            {ours: 0.15},
        ),
        Comparison(
            "L4",
            f"proportional set size when {what}",
            "MiB",
            {name: [each.pss_mib for each in found] for name, found in used.items()},
            "torchrun",
            {ours: 0.25},
        ),
    ]


def first_step(options: Options) -> list[Comparison]:
    """L2: replicas to the end of their first optimizer step."""
    case = Case(1 if options.quick else 8, "first_step")
    usual = default_preload()
    ours = "replicas, default preload"
    with state_of_its_own():
        samples = interleave(
            {
                "torchrun": lambda: launch_command(case, "torchrun").seconds,
                ours: lambda: launch_command(case, "replicas", usual).seconds,
                "multiprocessing spawn": lambda: launch_command(case, "spawn").seconds,
            },
            options.repetitions(3),
        )
    title = f"command start to {case.n} replicas' first optimizer step"
    return [Comparison("L2", title, "s", samples, "torchrun", {ours: 0.25})]


def heavy_imports(options: Options) -> list[Comparison]:
    """L6: replicas of a file with heavy imports at its top, launched the second time with preload="auto"."""
    from executors.backends.local.preload import PRELOAD, noted_imports
    from executors.backends.local.zygote_client import zygote

    has_transformers = importlib.util.find_spec("transformers") is not None
    imports = TRANSFORMERS if has_transformers else STAND_IN
    ours = 'replicas, preload="auto", second launch'
    with state_of_its_own(), tempfile.TemporaryDirectory() as folder:
        case = Case(1 if options.quick else 2, "first_line", Path(folder) / "heavy.py")
        case.file.write_text(HEAVY.format(imports=imports, here=str(HERE)))
        launch_here(case, "auto")
        # by then, the zygote has imported all modules
        zygote((*PRELOAD, *noted_imports(str(case.file)))).request({"do": "answer"})
        samples = interleave(
            {
                "torchrun": lambda: launch_command(case, "torchrun").seconds,
                ours: lambda: launch_here(case, "auto"),
            },
            options.repetitions(3),
        )
    title = f"command start, or second launch() in a live process, to {case.n} replicas that have imported transformers"
    note = "" if has_transformers else f"transformers is not installed; instead: {'; '.join(STAND_IN.splitlines())}"
    return [Comparison("L6", title, "s", samples, "torchrun", {ours: 0.1}, note)]


def many(options: Options) -> list[Comparison]:
    """L5: many replicas without torch."""
    case = Case(8 if options.quick else 256, "come_up")
    ours, again = "replicas, preload=()", "replicas, second launch in a live process"
    with state_of_its_own():
        launch_here(case, ())
        samples = interleave(
            {
                "multiprocessing forkserver": lambda: launch_command(case, "forkserver").seconds,
                ours: lambda: launch_command(case, "replicas").seconds,
                again: lambda: launch_here(case, ()),
            },
            options.repetitions(5),
        )
    title = f"command start to {case.n} replicas up, without torch"
    return [Comparison("L5", title, "s", samples, "multiprocessing forkserver", {ours: 0.3})]
