"""Makes the section about the size of the model, and its curves, from `docs/results/scaling.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

from diloco.outer_defaults import LONG_ROUND_OUTER, LONG_ROUND_STEPS, MEASURED_STEPS, SHORT_PLAN_OUTER, default_outer
from docs.generate.markdown import code, table
from docs.pictures.drawing import SMALL, THEMES, WIDTH, Drawing, Theme

DATA = Path(__file__).parents[1] / "results" / "scaling.json"
N, INNER_STEPS = 4, 50
"""The number of replicas and of inner steps of the curves and of the table of wires."""
GOAL_SIZE = "10M"
GOAL = 1.5
"""The goal: percent above data-parallel training at equal tokens."""
PANEL, LEFT, RIGHT, TOP, BOTTOM = 250, 62, 14, 40, 34
"""The height of the panel of one size, and the room around its curves."""


@dataclass(frozen=True)
class Run:
    """A run of `examples/scaling.py`. That file describes the values.

    Attributes:
        size: The name of the model's size.
        way: One replica alone, data-parallel training, or DiLoCo.
        n: The number of replicas.
        inner_steps: Steps from one round to the next.
        wire: The encoding of contributions.
        seed: The seed.
        steps: Inner steps of each replica.
        pretrained: The first steps, which are data-parallel.
        outer: The outer learning rate and momentum. Empty: there are no rounds.
        corpus: A digest of the text.
        curve: Steps and losses.
        tokens: Bytes that all replicas together have trained on.
        n_parameters: Parameters of the model.
        bytes_up: Bytes that one replica has sent.
        machine: The processor and the versions.
    """

    size: str
    way: str
    n: int
    inner_steps: int
    wire: str
    seed: int
    steps: int
    pretrained: int
    outer: str
    corpus: str
    curve: tuple[tuple[int, float], ...]
    tokens: int
    n_parameters: int
    bytes_up: int
    machine: str

    @property
    def loss(self) -> float:
        return self.curve[-1][1]

    @property
    def default_outer(self) -> str:
        """The outer settings that `DiLoCo` would choose for this run."""
        lr, momentum = default_outer(self.inner_steps, self.n_rounds)
        return f"{lr},{momentum}"

    @property
    def n_rounds(self) -> int:
        return ceil((self.steps - self.pretrained) / self.inner_steps)

    @property
    def bytes_of_a_step(self) -> float:
        """Bytes that one replica has sent for each parameter and each step with rounds."""
        return self.bytes_up / self.n_parameters / (self.steps - self.pretrained)


def runs_of(found: Mapping[str, Any]) -> list[Run]:
    """Return the runs of a data file, the smallest size first.

    Args:
        found: The data.
    """
    runs = [
        Run(
            **each["plan"],
            curve=tuple((int(step), float(loss)) for step, loss in each["curve"]),
            **{name: each[name] for name in ("corpus", "tokens", "n_parameters", "bytes_up", "machine")},
        )
        for each in found["runs"]
    ]
    return sorted(runs, key=lambda run: (run.n_parameters, run.steps, run.pretrained))


def above_data_parallel(run: Run, runs: Iterable[Run]) -> float | None:
    """Return by how many percent a run's loss is above data-parallel training on the same batches. None: not measured.

    Args:
        run: The run.
        runs: All runs.
    """
    same = ("size", "n", "seed", "steps", "corpus")
    for other in runs:
        if other.way == "data-parallel" and all(getattr(other, name) == getattr(run, name) for name in same):
            return 100 * (run.loss / other.loss - 1)
    return None


def _mean(chosen: Sequence[Run], runs: Sequence[Run]) -> str:
    found = [above for run in chosen if (above := above_data_parallel(run, runs)) is not None]
    return f"{fmean(found):+.1f} %" if found else ""


def _plans(runs: Iterable[Run]) -> list[tuple[str, int, int]]:
    return list(dict.fromkeys((run.size, run.steps, run.pretrained) for run in runs))


def _head(plan: tuple[str, int, int]) -> list[str]:
    size, steps, pretrained = plan
    return [size, f"{steps:,}", f"{pretrained:,}" if pretrained else "none"]


def by_rounds(runs: Sequence[Run]) -> str:
    """Return the table of sizes, replicas and inner steps.

    Args:
        runs: All runs.
    """
    plain = [run for run in runs if run.way == "diloco" and run.wire == "fp32" and run.outer == run.default_outer]
    lengths = sorted({run.inner_steps for run in plain})
    rows = []
    for plan in _plans(plain):
        for n in sorted({run.n for run in plain}):
            chosen = [run for run in plain if (run.size, run.steps, run.pretrained) == plan and run.n == n]
            cells = [_mean([run for run in chosen if run.inner_steps == length], runs) for length in lengths]
            if any(cells):
                rows.append([*_head(plan), str(n), *cells])
    heads = ["parameters", "steps", "pretrained", "replicas", *(f"`inner_steps={length}`" for length in lengths)]
    return table(heads, rows)


def _single_rounds(runs: Iterable[Run]) -> str:
    """Return a sentence for each plan of DiLoCo with a single round. Empty: there is none."""
    single = [run for run in runs if run.way == "diloco" and run.n_rounds == 1]
    plans = dict.fromkeys((run.steps, run.pretrained, run.inner_steps) for run in single)
    return " ".join(
        f"{_with_steps(steps, pretrained)}, rounds of {inner_steps} steps are a single round: the replicas are "
        "averaged once, at the end."
        for steps, pretrained, inner_steps in plans
    )


def _with_steps(steps: int, pretrained: int) -> str:
    """Return the first words of a sentence about runs with these steps."""
    return f"With {steps:,} steps and {f'{pretrained:,} of them' if pretrained else 'none'} pretrained"


def by_wire(runs: Sequence[Run]) -> str:
    """Return the table of wires, the one that sends most bytes first.

    Args:
        runs: All runs.
    """
    plain = [run for run in runs if (run.way, run.n, run.inner_steps) == ("diloco", N, INNER_STEPS)]
    wires = list(dict.fromkeys(run.wire for run in sorted(plain, key=lambda run: -run.bytes_of_a_step)))
    rows = []
    for plan in _plans(run for run in plain if run.wire != "fp32"):
        chosen = [run for run in plain if (run.size, run.steps, run.pretrained) == plan]
        for outer in sorted({run.outer for run in chosen if run.wire != "fp32"}):
            same = [run for run in chosen if run.outer == outer]
            cells = [_mean([run for run in same if run.wire == wire], runs) for wire in wires]
            rows.append([*_head(plan), outer, *cells])
    return table(["parameters", "steps", "pretrained", "outer", *(code(wire) for wire in wires)], rows)


def by_outer(runs: Sequence[Run]) -> str:
    """Return the table of outer settings: a row for each plan of which more than one was measured.

    Args:
        runs: All runs.
    """
    plain = [run for run in runs if run.way == "diloco" and run.wire == "fp32"]
    outers = sorted({run.outer for run in plain})
    rows = []
    for plan in _plans(plain):
        of_plan = [run for run in plain if (run.size, run.steps, run.pretrained) == plan]
        for n, inner_steps in sorted({(run.n, run.inner_steps) for run in of_plan}):
            chosen = [run for run in of_plan if (run.n, run.inner_steps) == (n, inner_steps)]
            found = _above_by_outer(chosen, runs)
            if len(found) > 1:
                cells = [f"{found[outer]:+.1f} %" if outer in found else "" for outer in outers]
                rows.append([*_head(plan), str(n), str(inner_steps), *cells])
    return table(["parameters", "steps", "pretrained", "replicas", "`inner_steps`", *outers], rows)


def _above_by_outer(chosen: Iterable[Run], runs: Sequence[Run]) -> dict[str, float]:
    """Return by how many percent runs are above data-parallel training, by their outer settings."""
    measured: dict[str, list[float]] = {}
    for run in chosen:
        if (above := above_data_parallel(run, runs)) is not None:
            measured.setdefault(run.outer, []).append(above)
    return {outer: fmean(each) for outer, each in measured.items()}


def _goal(runs: Sequence[Run]) -> str:
    """Return sentences about the goal, for each plan."""
    kind = (GOAL_SIZE, "diloco", N, INNER_STEPS, "fp32")
    chosen = [run for run in runs if (run.size, run.way, run.n, run.inner_steps, run.wire) == kind]
    sentences = []
    for plan in _plans(chosen):
        of_plan = [run for run in chosen if (run.size, run.steps, run.pretrained) == plan]
        if found := _above_by_outer(of_plan, runs):
            sentences.append(_goal_of(of_plan[0], found))
    return " ".join(sentences) or (
        "**No run for this goal has finished yet.** The smaller sizes show what was measured so far."
    )


def _goal_of(run: Run, found: Mapping[str, float]) -> str:
    """Return the sentences about the goal for the plan of a run, with the percentages by outer settings."""
    by_loss = sorted(found, key=lambda outer: found[outer])
    names = {outer: f"{outer} (the default)" if outer == run.default_outer else outer for outer in by_loss}
    holding = [names[outer] for outer in by_loss if found[outer] <= GOAL]
    result = "reached" if len(holding) == len(found) else f"reached with {', '.join(holding)}" if holding else "missed"
    each = ", ".join(f"{found[outer]:+.1f} % with {names[outer]}" for outer in by_loss)
    return (
        f"{_with_steps(run.steps, run.pretrained)}, the goal was {result}. By outer learning rate and momentum: {each}."
    )


def _named(outer: tuple[float, float]) -> str:
    lr, momentum = outer
    return f"{lr} and {momentum}"


def _seeds(runs: Sequence[Run]) -> str:
    """Return a sentence about the number of seeds."""
    n = len({run.seed for run in runs})
    return "Each number is from one seed." if n == 1 else f"A number is the mean of up to {n} seeds."


def section(found: Mapping[str, Any]) -> str:
    """Return the section.

    Args:
        found: The data.
    """
    runs = runs_of(found)
    parts = [
        "## The size of the model",
        "Byte-level transformers train on Python sources. All runs of a row see the same number of tokens for each "
        "replica. A number shows by how many percent the held-out loss is above data-parallel training on the same "
        f"batches. The goal is at most {GOAL:g} % with {GOAL_SIZE} parameters, {N} replicas and "
        f"`inner_steps={INNER_STEPS}`. "
        "*Pretrained* is the number of the first steps that are data-parallel. The replicas then continue with the "
        "same parameters and moments of AdamW. A run without pretraining starts from random parameters.",
        f"{_seeds(runs)} The columns *parameters*, *steps*, *pretrained* and *replicas* are the options `--sizes`, "
        "`--steps`, `--pretrained` and `--replicas` of the command below. The default outer learning rate and momentum "
        f"of plans of up to {MEASURED_STEPS:,} steps are {_named(LONG_ROUND_OUTER)} in rounds of at least "
        f"{LONG_ROUND_STEPS} steps, and {_named(SHORT_PLAN_OUTER)} in shorter rounds. {_single_rounds(runs)}".rstrip(),
        _goal(runs),
        *(
            f"```{{image}} scaling-{theme.name}.svg\n:alt: {drawing(theme, runs).title}\n:class: only-{theme.name}\n```"
            for theme in THEMES
        ),
    ]
    for title, made in (
        ('With `wire="fp32"` and the default outer settings:', by_rounds(runs)),
        (f"Wires, with {N} replicas and `inner_steps={INNER_STEPS}`. `mean_wire` is after a comma:", by_wire(runs)),
        ('Outer learning rate and momentum, with `wire="fp32"`:', by_outer(runs)),
    ):
        if made.count("\n") > 1:
            parts += [title, made]
    machines = "; ".join(dict.fromkeys(run.machine for run in runs))
    parts.append(
        f"Measured on: {machines}. The loss does not depend on the speed of the machine. Command: "
        f"{code(found['command'])}."
    )
    return "\n\n".join(parts)


# -- the curves --------------------------------------------------------------------------------------------------------


def curves_of(runs: Sequence[Run], size: str) -> list[tuple[str, str, bool, Run]]:
    """Return the name, the color, whether it is dashed, and the run of each curve of a size.

    Args:
        runs: All runs.
        size: The name of the size.
    """
    steps = max(run.steps for run in runs if run.size == size)
    of_size = [run for run in runs if (run.size, run.steps, run.seed) == (size, steps, 0)]
    kept: list[tuple[str, str, bool, Run]] = []
    for run in of_size:
        is_usual = (run.n, run.inner_steps, run.wire) == (N, INNER_STEPS, "fp32")
        if run.way == "alone":
            kept.append(("one replica alone", "orange", False, run))
        elif run.way == "data-parallel" and run.n == N:
            kept.append(("data-parallel", "green", False, run))
        elif run.way == "diloco" and is_usual and run.outer == run.default_outer:
            name = f"DiLoCo after {run.pretrained} steps" if run.pretrained else "DiLoCo"
            kept.append((name, "blue", bool(run.pretrained), run))
    return kept


def drawing(theme: Theme, runs: Sequence[Run]) -> Drawing:
    """Return the curves of held-out loss over tokens, one panel for each size.

    Args:
        theme: The colors.
        runs: All runs.
    """
    sizes = [size for size in dict.fromkeys(run.size for run in runs) if len(curves_of(runs, size)) > 1]
    title = (
        f"Held-out loss over the tokens of one replica, with {N} replicas and {INNER_STEPS} inner steps: "
        f"one panel for each size of the model ({', '.join(sizes)})."
    )
    made = Drawing(theme, max(1, len(sizes)) * PANEL, title)
    for index, size in enumerate(sizes):
        _panel(made, index * PANEL, size, curves_of(runs, size))
    return made


def _panel(made: Drawing, top: float, size: str, curves: Sequence[tuple[str, str, bool, Run]]) -> None:
    """Draw one panel. The curves begin at a tenth of the steps, because the first losses would hide all differences."""
    shown = [
        (
            name,
            color,
            dashed,
            [(run.tokens / run.n * step / run.steps, loss) for step, loss in run.curve if step * 10 >= run.steps],
        )
        for name, color, dashed, run in curves
    ]
    tokens = max(x for *_, points in shown for x, _ in points)
    losses = [y for *_, points in shown for _, y in points]
    low, high = min(losses), max(losses)
    bottom, right = top + PANEL - BOTTOM, WIDTH - RIGHT

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + (right - LEFT) * x / tokens, bottom - (bottom - top - TOP) * (y - low) / ((high - low) or 1)

    made.text(LEFT, top + 22, f"{size} parameters", is_bold=True)
    made.line((LEFT, top + TOP), (LEFT, bottom), (right, bottom), color="line", wide=1.5)
    for loss in (low, high):
        made.text(LEFT - 6, at(0, loss)[1] + 5, f"{loss:.2f}", color="faint", size=SMALL, anchor="end")
    made.text(right, bottom + 22, f"{tokens / 1e6:.2g} million tokens", color="faint", size=SMALL, anchor="end")
    for place, (name, color, dashed, points) in enumerate(shown):
        made.line(*(tuple(round(value, 1) for value in at(*point)) for point in points), color=color, is_dashed=dashed)  # type: ignore[arg-type]
        made.text(right, top + TOP + 14 + 20 * place, name, color=color, size=SMALL, anchor="end")


def picture(theme: Theme) -> str:
    """Return the curves as the text of an SVG file.

    Args:
        theme: The colors.
    """
    found = json.loads(DATA.read_text(encoding="utf-8"))
    return drawing(theme, runs_of(found)).svg()


PICTURES = {f"results/scaling-{theme.name}.svg": partial(picture, theme) for theme in THEMES if DATA.exists()}
"""The generated pictures, relative to `docs/`."""
