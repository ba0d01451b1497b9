"""The parts of the measurement on one GPU. `gpu.measure` runs each in a process of its own.

    PYTHONPATH=.:tests python -m gpu.parts overlap overlap.json 90

The three words are the part, the file for its figures, and the time limit in seconds.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

import torch

from diloco import DiLoCo
from executors import LocalProcessExecutor, ReplicaStatus, Run, launch
from executors.store import MemoryStore
from gpu.learner import DEVICE, IS_SMALL, SETUP, Learner, held_out_loss, memory, synchronize, train, train_with_marks

TESTS = Path(__file__).parents[1]
MANY_STEPS, FEW_STEPS = 200, 20
"""The largest and the smallest half of the steps between two rounds of the overlap."""
ROUNDS_OF_OVERLAP = 2 if IS_SMALL else 3


class Figures:
    """The figures of a part, in a file that always holds all figures so far.

    Args:
        file: the file.
        limit_s: the time limit of the part, in seconds.
    """

    def __init__(self, file: Path, limit_s: float) -> None:
        self.found: dict[str, Any] = {}
        self._file = file
        self._deadline = time.monotonic() + limit_s

    def add(self, **figures: Any) -> None:
        """Add figures, and write the file.

        Args:
            figures: the figures by name.
        """
        self.found |= figures
        part = self._file.with_name(f"{self._file.name}.part")
        part.write_text(json.dumps(self.found))
        part.replace(self._file)
        print(json.dumps(figures), flush=True)

    def left_s(self, but: float = 0.0) -> float:
        """Return the seconds until the time limit.

        Args:
            but: seconds that must remain. Default 0.
        """
        return max(0.0, self._deadline - time.monotonic() - but)


# -- machine and checks ------------------------------------------------------------------------------------------------


def machine(figures: Figures) -> None:
    """Report the device and the versions, and use the device once."""
    host = {name: os.sysconf(name) for name in ("SC_PAGE_SIZE", "SC_PHYS_PAGES")}
    figures.add(
        torch=torch.__version__,
        cuda=torch.version.cuda,
        python=platform.python_version(),
        cores=os.cpu_count(),
        torch_threads=torch.get_num_threads(),
        host_bytes=host["SC_PAGE_SIZE"] * host["SC_PHYS_PAGES"],
        free_disk_bytes=shutil.disk_usage(tempfile.gettempdir()).free,
        has_nvidia_smi=shutil.which("nvidia-smi") is not None,
    )
    if DEVICE == "cpu":
        figures.add(device=platform.processor() or platform.machine())
        return
    figures.add(
        device=torch.cuda.get_device_name(),
        n_devices=torch.cuda.device_count(),
        device_bytes=torch.cuda.mem_get_info()[1],
        sum_of_ones=torch.ones(1000, device=DEVICE).sum().item(),
        capability=".".join(map(str, torch.cuda.get_device_capability())),
    )
    try:
        figures.add(utilization_percent=torch.cuda.utilization())
    except Exception as error:  # noqa: BLE001 - only the rows of usage need this
        figures.add(utilization_percent=None, why_no_utilization=f"{type(error).__name__}: {error}")


def checks(figures: Figures) -> None:
    """Run the tests that need a GPU. On a CPU, run the quick variants of some of these tests for the CPU."""
    files = [file for file in TESTS.glob("*/test_*.py") if "mark.cuda" in file.read_text(encoding="utf-8")]
    files.sort(reverse=True)  # the quick tests in `training` are first
    chosen = ["-k", "bits_of_the_cpu"] if DEVICE == "cpu" else ["-m", "cuda"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        # The settings and fixtures of this project need packages that a machine with a GPU may lack.
        settings = ["-c", os.devnull, "--noconftest", "--rootdir", str(TESTS), "-p", "no:cacheprovider", "-v", "-rs"]
        settings += ["--continue-on-collection-errors"]  # a file may need a package that is missing
        limits = ["-o", f"faulthandler_timeout={figures.left_s(but=50):.0f}", f"--junit-xml={report}"]
        command = [sys.executable, "-m", "pytest", *settings, *limits, *chosen, *map(str, files)]
        process = subprocess.Popen(command)
        try:
            code: int | None = process.wait(figures.left_s(but=15))
        except subprocess.TimeoutExpired:
            code = None
            process.send_signal(signal.SIGINT)  # pytest then names the test, and writes its report
        finally:
            try:
                process.wait(7)
            except subprocess.TimeoutExpired:
                process.kill()
        results = _results_of(report)
    counts = Counter(result["result"] for result in results.values())
    figures.add(counts=counts, tests=results)
    if code is None:
        raise TimeoutError("The tests did not end in time. The log names the test.")
    if code != 0:
        raise RuntimeError(f"pytest ended with code {code}. The log has the reason.")
    if not counts["passed"]:
        raise RuntimeError(f"All tests were skipped: {dict(counts)}. The log has the reasons.")


def _results_of(report: Path) -> dict[str, dict[str, Any]]:
    if not report.exists():
        return {}
    found = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        name = f"{case.get('classname')}::{case.get('name')}"
        found[name] = {"result": kinds[0] if kinds else "passed", "seconds": float(case.get("time") or 0)}
    return found


# -- overlap -----------------------------------------------------------------------------------------------------------


def overlap(figures: Figures) -> None:
    """Compare the steps during a round in the background with the steps between rounds, in turn."""
    learner = Learner(0)
    alone_s = learner.seconds_per_step()
    half = max(FEW_STEPS, min(MANY_STEPS, round(SETUP.round_s / alone_s)))
    n_parameters = sum(p.numel() for p in learner.model.parameters())
    figures.add(n_parameters=n_parameters, step_s_without_diloco=alone_s, inner_steps=2 * half, overlap_steps=half)
    del learner
    for merge in ("anchor", "carry"):
        figures.add(**{merge: overlap_of(half, merge)})
        _free()
    figures.add(step_s_without_diloco_at_the_end=Learner(0).seconds_per_step())


def overlap_of(half: int, merge: Literal["anchor", "carry"]) -> dict[str, Any]:
    """Measure the overlap with one kind of merge.

    A round begins in the step `half - 1` of a period, counted from 0, which also copies the parameters. The last step
    of the period merges its mean. So the window beside a round is from the first to the second of these steps,
    inclusive. The other window is the rest of the period.

    Args:
        half: the steps between sending the work and merging the mean. A period has twice this number of steps.
        merge: how a mean changes the live parameters.
    """
    learner = Learner(0)
    period = 2 * half
    beside: list[float] = []
    without: list[float] = []
    busy: list[float] = []
    late: list[float] = []
    with DiLoCo(
        learner.model,
        inner_steps=period,
        overlap_steps=half,
        total_steps=period * (ROUNDS_OF_OVERLAP + 2),
        merge=merge,
        store=MemoryStore(),
        run_id="overlap",
        rank=0,
        world_size=1,
        allow_no_rounds=True,
    ) as diloco:
        learner.warm_up()
        began = synchronize()
        for step in range(period * (ROUNDS_OF_OVERLAP + 1)):
            is_first_round = step < period  # it allocates memory
            if step % period == half - 1:
                now = synchronize()
                if not is_first_round:
                    without.append((now - began) / (half - 1))
                began = now
            learner.step()
            report = diloco.step()
            if (report is not None) != (step % period == period - 1):
                raise RuntimeError(f"Step {step} of periods of {period} steps gave the report {report}.")
            if report is not None:
                now = synchronize()
                if report.stale_steps != half:
                    raise RuntimeError(f"The merge came {report.stale_steps} steps after sending, expected {half}.")
                if not is_first_round:
                    beside.append((now - began) / (half + 1))
                    busy.append(report.busy_s or 0.0)
                    late.append(report.late_s or 0.0)
                began = now
    # Each round is compared with the window before it.
    pairs = list(zip(beside, without, strict=True))
    extra = [(one - other) * (half + 1) for one, other in pairs]
    return {
        "step_s_beside_a_round": median(beside),
        "step_s_without": median(without),
        "ratio": median(one / other for one, other in pairs),
        "ratios": [one / other for one, other in pairs],
        "extra_s_of_a_round": median(extra),
        "ratio_while_busy": 1 + median(e / b for e, b in zip(extra, busy, strict=True)) if all(busy) else None,
        "busy_s": busy,
        "late_s": late,
        "memory": memory(),
    }


def _free() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# -- restart -----------------------------------------------------------------------------------------------------------


def restart(figures: Figures) -> None:
    """Kill a replica, then let the other one raise, and split the time until the next optimizer step of each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = launch(LocalProcessExecutor(), train_with_marks, 2, args={"folder": name}, restarts=3)
        with watched(run):
            trained = [folder / f"{rank}.0.trained" for rank in (0, 1)]
            _await(run, lambda: all(file.exists() for file in trained), figures.left_s(but=40), [0, 0])
            killed = time.monotonic()
            os.kill(int(trained[1].read_text()), signal.SIGKILL)
            _await(run, (folder / "1.1.json").exists, figures.left_s(but=25), [0, 1])
            figures.add(after_a_kill=_split(folder / "1.1.json", killed))
            (folder / "0.0.raise").touch()
            _await(run, (folder / "0.1.json").exists, figures.left_s(but=12), [1, 1])
            raised = float((folder / "0.0.raised").read_text())
            figures.add(after_an_error_in_the_same_process=_split(folder / "0.1.json", raised))
            (folder / "end").touch()


def _split(file: Path, failed: float) -> dict[str, float]:
    """Return the seconds of each part of a restart: until the mark of this name since the mark before it."""
    noted = json.loads(file.read_text())
    split = {"whole_s": noted["marks"]["step"] - failed}
    before = failed
    for name, at in noted["marks"].items():
        split[f"{name}_s"], before = at - before, at
    # DiLoCo reads, proves and loads in both parts. The reads are also measured alone.
    return {**split, **noted["reads"]}


@contextmanager
def watched(run: Run) -> Iterator[None]:
    """Print the logs of a run if the body raises an error, and cancel the run at the end of the body.

    Args:
        run: the run.
    """
    try:
        yield
    except BaseException:
        print(run.logs(tail=60, attempt="all"), file=sys.stderr, flush=True)
        raise
    finally:
        run.cancel()
        run.wait(10)


def _await(run: Run, condition: Callable[[], bool], limit_s: float, attempts: list[int]) -> None:
    """Wait for a condition.

    Args:
        run: the run.
        condition: the condition.
        limit_s: the longest wait in seconds.
        attempts: for each rank, the number of the attempt that must not end before.

    Raises:
        RuntimeError: an attempt ended first.
        TimeoutError: the time has passed.
    """
    deadline, look_at = time.monotonic() + limit_s, 0.0
    while not condition():
        now = time.monotonic()
        if now > deadline:
            raise TimeoutError(f"{limit_s:.0f} s have passed.")
        if now > look_at:
            look_at = now + 0.5
            for outcome in run.outcomes():
                allowed = attempts[outcome.rank]
                if outcome.attempt > allowed or (outcome.attempt == allowed and outcome.status.is_terminal):
                    raise RuntimeError(f"Rank {outcome.rank} ended too early: {outcome.error or outcome.status}")
        time.sleep(0.01)


# -- training ----------------------------------------------------------------------------------------------------------


def training(figures: Figures) -> None:
    """Train four replicas on the one device, and one process on as many tokens."""
    n = 2 if IS_SMALL else 4
    alone_s = Learner(0).seconds_per_step()
    _free()
    # The replicas share the device. A round of four contributions of 485 MB is expected to take about four seconds.
    step_s = 1.2 * n * alone_s + (0.0 if IS_SMALL else 4.0 / SETUP.inner_steps)
    rounds = max(2, min(10, int(SETUP.train_s / step_s / SETUP.inner_steps)))
    steps = rounds * SETUP.inner_steps
    figures.add(
        replicas=n,
        step_s_alone=alone_s,
        steps=steps,
        inner_steps=SETUP.inner_steps,
        batch=SETUP.batch,
        context=SETUP.context,
    )
    done_steps, problem = _train_replicas(figures, n, steps)
    _free()
    learner = Learner(0, n)
    learner.warm_up()
    began = synchronize()
    for done in range(1, done_steps + 1):
        learner.step()
        if done % 20 == 0:
            synchronize()
            if not figures.left_s(but=12):
                break
    seconds = synchronize() - began
    together = {"steps": done, "loss": held_out_loss(learner.model), "seconds": seconds, "memory": memory()}
    figures.add(together={**together, "tokens_per_s": _tokens(n, done) / seconds})
    if problem is not None:
        raise RuntimeError(problem)


def _tokens(n: int, steps: int) -> int:
    return n * steps * SETUP.batch * SETUP.context


def _train_replicas(figures: Figures, n: int, steps: int) -> tuple[int, str | None]:
    """Train replicas, and return the number of their steps, and the problem, if there was one."""
    run = launch(LocalProcessExecutor(), train, n, args={"steps": steps})
    deadline = time.monotonic() + figures.left_s(but=65)
    used = 0
    has_ended = False
    try:
        while not has_ended and time.monotonic() < deadline:
            if DEVICE == "cuda":
                free, total = torch.cuda.mem_get_info()
                used = max(used, total - free)
            has_ended = run.wait(1.0)
    finally:
        if not has_ended:
            run.cancel()
            run.wait(15)
    outcomes = run.outcomes()
    done = [outcome for outcome in outcomes if outcome.status is ReplicaStatus.SUCCEEDED]
    done_steps = max((outcome.result["steps"] for outcome in done), default=steps)
    is_whole = len(done) == n
    figures.add(
        results=[outcome.result for outcome in outcomes],
        tokens=_tokens(n, done_steps),
        tokens_per_s=_tokens(n, done_steps) / max(one.result["seconds"] for one in done) if is_whole else None,
        peak_used_of_the_device=used,
        usage=_usage(run),
    )
    if is_whole:
        return done_steps, None
    print(run.logs(tail=60), file=sys.stderr, flush=True)
    return done_steps, "; ".join(
        f"Rank {one.rank}: {one.status} {one.error_line or one.error or ''}" for one in outcomes
    )


def _usage(run: Run) -> list[dict[str, Any]]:
    """Return what the rows of usage say about each rank."""
    rows = run.metrics().usage
    found = []
    for rank in run.ranks:
        mine = [row for row in rows if row.rank == rank]
        shares = [row.gpu_use for row in mine if row.gpu_use is not None]
        found.append(
            {
                "rows": len(mine),
                "mean_cores": mean(row.cpu for row in mine) if mine else None,
                "peak_rss": max((row.rss for row in mine), default=None),
                "peak_gpu_mem": max((row.gpu_mem for row in mine if row.gpu_mem is not None), default=None),
                "mean_gpu_use": mean(shares) if shares else None,
            }
        )
    return found


PARTS = {part.__name__: part for part in (machine, checks, overlap, restart, training)}


def main(name: str, file: str, limit: str) -> int:
    """Measure one part.

    Args:
        name: the part.
        file: the file for its figures.
        limit: the time limit in seconds.

    Returns: the exit code. 1: the part failed.
    """
    limit_s = float(limit)
    faulthandler.dump_traceback_later(max(1.0, limit_s - 3))
    figures = Figures(Path(file), limit_s)
    try:
        PARTS[name](figures)
    except Exception:  # noqa: BLE001 - the error is one of the results
        traceback.print_exc()
        figures.add(error=traceback.format_exc())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
