"""Shared parts of all benchmarks: repetitions in turn, comparisons by medians, the table, the JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

PACKAGES = ("serverless-replicas", "torch", "numpy", "xxhash")


@dataclass(frozen=True)
class Options:
    """The number and length of measurements."""

    repeat: int | None = None
    """The number of repetitions. None: each benchmark decides."""
    quick: bool = False
    """True: use tiny sizes, only to check that everything runs. The figures then mean nothing."""

    seconds: float | None = None
    """The duration, in seconds, of benchmarks that run for a given time. None: each benchmark decides."""

    def repetitions(self, usual: int) -> int:
        return self.repeat or (1 if self.quick else usual)


@dataclass
class Comparison:
    """One quantity, measured for several methods, relative to one of them or to a bound."""

    name: str
    """The name in the list of goals: L1, S1, …"""
    title: str
    unit: str
    samples: dict[str, list[float]]
    base: str | None = None
    """The peer or floor that the other methods are divided by. None: the goals are absolute."""
    goals: Mapping[str, float] = field(default_factory=dict)
    """The goal of each method: the largest allowed ratio, or the largest allowed value if there is no `base`."""
    note: str = ""

    def value(self, method: str) -> float:
        return median(self.samples[method])

    def ratio(self, method: str) -> float | None:
        return None if self.base is None else self.value(method) / self.value(self.base)

    def holds(self, method: str) -> bool | None:
        """Return True if the method reaches its goal. None: it has no goal."""
        if method not in self.goals:
            return None
        ratio = self.ratio(method)
        return (self.value(method) if ratio is None else ratio) <= self.goals[method]

    def to_json(self) -> dict[str, Any]:
        rows = {
            method: {
                "median": self.value(method),
                "min": min(samples),
                "max": max(samples),
                "ratio": self.ratio(method),
                "goal": self.goals.get(method),
                "holds": self.holds(method),
                "samples": samples,
            }
            for method, samples in self.samples.items()
        }
        head = {"name": self.name, "title": self.title, "unit": self.unit, "base": self.base, "note": self.note}
        return {**head, "methods": rows}


def interleave(methods: Mapping[str, Callable[[], float]], repetitions: int) -> dict[str, list[float]]:
    """Measure all methods in turn, several times, so that other load on this machine affects all of them."""
    samples: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repetitions):
        for name, measure in methods.items():
            samples[name].append(measure())
    return samples


def machine() -> dict[str, Any]:
    """Return a description of this machine."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "unknown"
    )
    memory_kib = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / 2**20, 1),
        "load_1m": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {package: importlib.metadata.version(package) for package in PACKAGES},
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def table(comparisons: Sequence[Comparison]) -> Table:
    """Return the comparisons as a table for readers."""
    made = Table(box=box.SIMPLE_HEAD, title="Medians; ratios within one run")
    for column in ("", "median", "min", "max", "ratio", "goal", "holds"):
        made.add_column(column, justify="right" if column else "left", no_wrap=bool(column))
    for comparison in comparisons:
        made.add_section()
        made.add_row(f"[bold]{comparison.name}[/]  {comparison.title}, {comparison.unit}")
        for method, samples in comparison.samples.items():
            ratio, goal, holds = comparison.ratio(method), comparison.goals.get(method), comparison.holds(method)
            made.add_row(
                f"    {escape(method)}",
                _text(comparison.value(method)),
                _text(min(samples)),
                _text(max(samples)),
                "" if ratio is None else f"{ratio:.3f}",
                "" if goal is None else f"≤ {goal:g}",
                "" if holds is None else "[green]yes[/]" if holds else "[red]no[/]",
            )
        if comparison.note:
            made.add_row(f"    [dim]{escape(comparison.note)}[/]")
    return made


def _text(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def report(comparisons: Sequence[Comparison], file: Path | None) -> None:
    """Print the table, and write all samples to a file."""
    where = machine()
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    console.print(table(comparisons))
    console.print(f"{where['cpu']}, {where['cores']} cores, Python {where['python']}, {where['versions']}")
    if file is not None:
        document = {"machine": where, "comparisons": [comparison.to_json() for comparison in comparisons]}
        file.write_text(json.dumps(document, indent=1) + "\n")
