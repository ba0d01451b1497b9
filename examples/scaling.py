"""Measures how DiLoCo scales with the size of the model. It makes docs/results/scaling.json.

    python examples/scaling.py --lines scaling.jsonl --sizes 0.14M 1M               # 36 runs, about 5 hours of a core
    python examples/scaling.py --lines scaling.jsonl --sizes 10M --replicas 4 --inner-steps 50 --pretrained 300
    python examples/scaling.py --lines scaling.jsonl --write docs/results/scaling.json --no-more

Each run trains a byte-level transformer on Python sources of this machine. A run is one replica alone, data-parallel
training on the batches of N replicas, or DiLoCo. All see the same number of tokens for each replica, and the held-out
loss is measured eight times.

With `--pretrained STEPS`, a run of DiLoCo branches from the data-parallel run of the same batches after this number of
steps. `--steps` and the learning rate cover the steps before and after it. Each replica begins with the moments of
AdamW, too, as after `torch.load` of a checkpoint. So the data-parallel run of all steps is the run to compare with. A
data-parallel run keeps its state at the branch, and all ways share it.

One process plays all replicas of a run: they take turns, and exchange averages by `DiLoCo` in the memory of the
process. Each finished run is one line of the file that `--lines` names. A run that is interrupted continues at its last
checkpoint, in the file beside it. The wires keep a rest of what they have rounded. After an interruption the rest is
zero, so a line has the number of interruptions.

`--finished docs/results/scaling.json` continues the published runs: a run on the same text is not repeated, and
`--write` keeps all of them. The text depends on the installed packages. With other packages, the runs of your grid are
made again, and the page compares only runs on the same text.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import sysconfig
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor
from xxhash import xxh3_128

from diloco import DiLoCo
from diloco.demo import ByteTransformer
from diloco.in_processes import in_processes
from diloco.outer_defaults import default_outer
from diloco.rendezvous.keys import Keys
from executors.store import MemoryStore

Way = Literal["alone", "data-parallel", "diloco"]
CORPUS_BYTES, SMALLEST_FILE, HELD_OUT = 80 << 20, 1 << 10, 50
"""The bytes of text to read, the bytes of a file to read, and N: one of N files is held out."""
COMMAND = "python examples/scaling.py --lines scaling.jsonl --write docs/results/scaling.json"
BATCH = 8  # windows in a batch of one replica
RUN_ID, NAME = "scaling", "main"
WARMUP, FLOOR = (
    0.05,
    0.1,
)  # the share of steps in which the learning rate rises, and the share of it that is left at the end
DEFAULT_OUTER = "default"
"""A value of `--outer`: the outer settings that `DiLoCo` chooses for the plan."""
N_EVALUATIONS = 8
SAVE_EVERY_S = 120.0


@dataclass(frozen=True)
class Size:
    """A model and its plan.

    Attributes:
        width: features of each byte.
        layers: the number of layers.
        heads: heads of the attention.
        context: bytes that a prediction can see.
        rate: the highest learning rate of AdamW.
        steps: inner steps of each replica.
    """

    width: int
    layers: int
    heads: int
    context: int
    rate: float
    steps: int

    def model(self, seed: int) -> ByteTransformer:
        """Return the model with the parameters that a seed gives."""
        torch.manual_seed(seed)
        return ByteTransformer(self.width, self.layers, self.heads, self.context)


SIZES = {
    "0.14M": Size(64, 2, 2, 64, 3e-3, 1000),
    "1M": Size(128, 5, 4, 128, 2e-3, 1000),
    "10M": Size(320, 8, 5, 128, 1e-3, 600),
}


@dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        size: the name of the model's size.
        way: one replica alone, data-parallel training, or DiLoCo.
        n: the number of replicas.
        inner_steps: steps from one round to the next. 0: there are no rounds.
        wire: the encoding of contributions. Empty: there are no rounds.
        seed: the seed of the model and of the batches.
        steps: inner steps of each replica.
        pretrained: the first of these steps that are data-parallel in a run of DiLoCo, as in the papers on DiLoCo.
        outer: the outer learning rate and momentum with a comma between them. Empty: there are no rounds.
    """

    size: str
    way: Way
    n: int
    inner_steps: int
    wire: str
    seed: int
    steps: int
    pretrained: int = 0
    outer: str = ""

    @property
    def name(self) -> str:
        """Return a name for files and messages."""
        parts = [self.size, self.way, self.n, self.inner_steps, self.wire, self.seed, self.steps]
        name = "-".join(str(value) for value in parts if value not in ("", 0)).replace(",", "_")
        after = f"-after-{self.pretrained}" if self.pretrained else ""
        return name + after + (f"-outer-{self.outer.replace(',', '_')}" if self.outer else "")

    @property
    def pretraining(self) -> Plan:
        """Return the data-parallel run that this run branches from."""
        return replace(self, way="data-parallel", inner_steps=0, wire="", pretrained=0, outer="")


@dataclass(frozen=True)
class Trained:
    """The result of a run.

    Attributes:
        plan: the run.
        n_parameters: parameters of the model.
        tokens: bytes that all replicas together have trained on.
        curve: the step and the loss on the held-out text, in nats per byte.
        bytes_up: bytes that one replica has sent.
        bytes_down: bytes that one replica has read.
        cpu_s: seconds of processor time.
        interruptions: how often the run continued from a checkpoint.
        corpus: a digest of the text.
        machine: the processor and the versions.
    """

    plan: Plan
    n_parameters: int
    tokens: int
    curve: list[tuple[int, float]]
    bytes_up: int
    bytes_down: int
    cpu_s: float
    interruptions: int
    corpus: str
    machine: str

    @property
    def loss(self) -> float:
        return self.curve[-1][1]


# -- the text ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """The text of the runs.

    Attributes:
        files: the bytes to train on, one array of uint8 for each file.
        held_out: the bytes to evaluate on.
        digest: a digest of all bytes.
    """

    files: tuple[Tensor, ...]
    held_out: Tensor
    digest: str

    def share(self, rank: int, n: int) -> Tensor:
        """Return the bytes of one of n replicas."""
        return torch.cat(self.files[rank::n])


@cache
def corpus(limit: int = CORPUS_BYTES) -> Corpus:
    """Read Python sources: the standard library first, then installed packages. Equal files are read once.

    Args:
        limit: the number of bytes after which no more files are read.
    """
    files: dict[int, Tensor] = {}
    total = 0
    library = Path(sysconfig.get_path("stdlib"))
    of_library = [path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts]
    for path in [*of_library, *sorted(Path(sysconfig.get_path("purelib")).rglob("*.py"))]:
        content = path.read_bytes()
        digest = xxh3_128(content).intdigest()
        if len(content) >= SMALLEST_FILE and digest not in files:
            files[digest] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            total += len(content)
        if total >= limit:
            break
    digests = sorted(files)  # in this order, all shares have all kinds of files
    held_out = digests[::HELD_OUT]
    training = [digest for digest in digests if digest not in {*held_out}]
    name = xxh3_128(b"".join(digest.to_bytes(16, "big") for digest in digests)).hexdigest()
    return Corpus(tuple(files[each] for each in training), torch.cat([files[each] for each in held_out]), name)


def windows(text: Tensor, count: int, context: int, generator: torch.Generator) -> Tensor:
    """Return random windows of context + 1 bytes of a text: (count, context + 1)."""
    starts = torch.randint(len(text) - context, (count,), generator=generator)
    return torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()


# -- one run -----------------------------------------------------------------------------------------------------------


class Learner:
    """A model with its AdamW, and a stream of batches for each share that it trains on.

    Args:
        plan: the run.
        ranks: the replicas whose batches it trains on.
    """

    def __init__(self, plan: Plan, ranks: Sequence[int]) -> None:
        self.plan, self.size = plan, SIZES[plan.size]
        self.model = self.size.model(plan.seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), self.size.rate, foreach=True)
        self.texts = [corpus().share(rank, plan.n) for rank in ranks]
        self.generators = [torch.Generator().manual_seed(1000 * plan.seed + rank) for rank in ranks]

    def step(self, step: int) -> None:
        """Make one inner step on one batch of each of its replicas."""
        plan, size = self.plan, self.size
        warmup = max(1, round(WARMUP * plan.steps))
        cosine = FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / plan.steps)))
        for group in self.optimizer.param_groups:
            group["lr"] = size.rate * min(1.0, (step + 1) / warmup) * cosine
        for text, generator in zip(self.texts, self.generators, strict=True):
            loss = self.model.loss(windows(text, BATCH, size.context, generator)) / len(self.texts)
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """Return all that a later process needs to continue."""
        generators = [generator.get_state() for generator in self.generators]
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "generators": generators}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from the state of an earlier process."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for generator, bits in zip(self.generators, state["generators"], strict=True):
            generator.set_state(bits)


class Checkpoint:
    """The file from which an interrupted run continues.

    Args:
        path: the file. None: nothing is kept.
        every_s: the least number of seconds between two checkpoints.
    """

    def __init__(self, path: Path | None, every_s: float) -> None:
        self.path, self.every_s = path, every_s
        self.saved_at = time.monotonic()

    def read(self) -> dict[str, Any] | None:
        """Return the newest state. None: the run begins."""
        if self.path is None or not self.path.exists():
            return None
        found: dict[str, Any] = torch.load(self.path, weights_only=True)
        return found

    @property
    def is_due(self) -> bool:
        return self.path is not None and time.monotonic() - self.saved_at > self.every_s

    def write(self, state: dict[str, Any]) -> None:
        """Replace the file."""
        assert self.path is not None
        part = self.path.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, self.path)
        self.saved_at = time.monotonic()

    def remove(self) -> None:
        """Remove the file of a run that has ended."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def held_out_loss(model: ByteTransformer) -> float:
    """Return the loss on the held-out text, in nats per byte. Each call uses the same 512 windows."""
    picked = windows(corpus().held_out, 512, model.context, torch.Generator().manual_seed(1))
    with torch.no_grad():
        losses = [model.loss(part).item() for part in torch.split(picked, 32)]
    return sum(losses) / len(losses)


class Replicas:
    """All replicas of a run, in this process. They take turns at inner steps, and count each step at the same time.

    Args:
        plan: the run.
        kept: the state of an earlier process, from `state`. Empty: the run begins.
        at_once: a thread for each replica, because in a round replicas wait for each other.
    """

    def __init__(self, plan: Plan, kept: dict[str, Any], at_once: ThreadPoolExecutor) -> None:
        self._plan, self._at_once = plan, at_once
        together = plan.way != "diloco"
        self._learners = [Learner(plan, [*range(plan.n)])] if together else [Learner(plan, [n]) for n in range(plan.n)]
        for learner, state in zip(self._learners, kept.get("learners", []), strict=False):
            learner.load(state)
        self._store = MemoryStore()
        for key, data in kept.get("objects", {}).items():
            self._store.put(key, data.numpy().tobytes())
        self._end_earlier_attempts(kept.get("objects", ()))
        self._dilocos = [] if together else list(at_once.map(self._open, range(plan.n)))
        self.bytes_up, self.bytes_down = kept.get("bytes_up", 0), kept.get("bytes_down", 0)

    def _end_earlier_attempts(self, kept: Collection[str]) -> None:
        """Record that the replicas of an earlier process have left.

        Otherwise the first replica that continues would believe that the others are in the middle of a phase. It would
        then send its work of no steps at once, and its next steps would miss a round.
        """
        keys = Keys(RUN_ID, NAME)
        for rank in range(self._plan.n):
            attempt = 0
            while keys.claim(rank, attempt) in kept:
                self._store.put(keys.bye(rank, attempt), b"")
                attempt += 1

    def _open(self, rank: int) -> DiLoCo:
        plan = self._plan
        wire, _, mean = plan.wire.partition(",")
        outer_lr, outer_momentum = map(float, plan.outer.split(","))
        return DiLoCo(
            self._learners[rank].model,
            inner_steps=plan.inner_steps,
            total_steps=plan.steps - plan.pretrained,
            min_quorum=plan.n,  # under load a replica may come late to its first round after an interruption
            wire=wire,
            mean_wire=mean or None,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            store=self._store,
            run_id=RUN_ID,
            name=NAME,
            rank=rank,
            world_size=plan.n,
        )

    def are_averaged(self, step: int) -> bool:
        """Return True if all replicas have the same parameters after a number of steps."""
        plan = self._plan
        return not self._dilocos or (step - plan.pretrained) % plan.inner_steps == 0 or step == plan.steps

    def parameters(self) -> dict[str, Tensor]:
        """Return the averaged parameters."""
        return self._dilocos[0].anchor() if self._dilocos else self._learners[0].model.state_dict()

    def step(self, step: int) -> None:
        """Make one inner step in each replica, and the round that is due after it."""
        for learner in self._learners:
            learner.step(step)
        for report in self._at_once.map(DiLoCo.step, self._dilocos):
            if report is not None:
                assert len(report.ranks) == self._plan.n, f"a replica is not in the round: {report}"
                self.bytes_up += report.bytes_up
                self.bytes_down += report.bytes_down

    def state(self) -> dict[str, Any]:
        """Return all that a later process needs to continue after a round."""
        return {
            "learners": [learner.state() for learner in self._learners],
            "objects": {
                entry.key: torch.frombuffer(bytearray(self._store.get(entry.key)), dtype=torch.uint8)
                for entry in self._store.list("")
                if entry.size_bytes
            },
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
        }

    def close(self) -> None:
        """End the run."""
        list(self._at_once.map(DiLoCo.close, self._dilocos))


def branch_path(plan: Plan, step: int, folder: Path) -> Path:
    """Return the file with the state of a data-parallel run after a number of steps."""
    return folder / f"{plan.name}.branch-{step}.pt"


def pretrained(plan: Plan, folder: Path | None, save_every_s: float) -> dict[str, Any]:
    """Return the state in which the replicas of a plan begin. Without pretraining it is empty.

    Each replica begins with the parameters and AdamW moments of the data-parallel run, and continues its own stream of
    batches. So the data-parallel run of all steps is the continuation to compare with, to the last bit.

    Args:
        plan: the run.
        folder: the folder that keeps the state for other plans. None: it is computed each time.
        save_every_s: the least number of seconds between two checkpoints.
    """
    if not plan.pretrained:
        return {}
    with TemporaryDirectory() as passing:
        path = branch_path(plan.pretraining, plan.pretrained, folder or Path(passing))
        if not path.exists():
            train(plan.pretraining, path.parent, save_every_s, branches=[plan.pretrained], until=plan.pretrained)
        kept: dict[str, Any] = torch.load(path, weights_only=True)
    learner = kept["learners"][0]
    each = [{**learner, "generators": [generator]} for generator in learner["generators"]]
    return {"step": kept["step"], "curve": kept["curve"], "learners": each}


def train(
    plan: Plan,
    folder: Path | None = None,
    save_every_s: float = SAVE_EVERY_S,
    *,
    branches: Sequence[int] = (),
    until: int | None = None,
) -> Trained:
    """Carry out a run.

    Args:
        plan: the run.
        folder: the folder of the checkpoint. None: an interrupted run begins again.
        save_every_s: the least number of seconds between two checkpoints.
        branches: the steps at which a data-parallel run keeps its state for runs that it pretrains.
        until: the step at which to stop. The folder then keeps the checkpoint of this step. None: the last step.
    """
    torch.set_num_threads(1)
    checkpoint = Checkpoint(None if folder is None else folder / f"{plan.name}.pt", save_every_s)
    kept = checkpoint.read() or pretrained(plan, folder, save_every_s)
    curve = [(int(step), float(loss)) for step, loss in kept.get("curve", [])]
    interruptions = kept.get("interruptions", -1) + 1
    evaluated = SIZES[plan.size].model(plan.seed)
    every = max(1, plan.steps // N_EVALUATIONS)
    cpu_s = kept.get("cpu_s", 0.0) - time.process_time()
    with ThreadPoolExecutor(plan.n) as at_once:
        replicas = Replicas(plan, kept, at_once)
        for step in range(kept.get("step", 0), plan.steps + 1):
            if replicas.are_averaged(step):
                if not curve or step >= min(curve[-1][0] + every, plan.steps):
                    evaluated.load_state_dict(replicas.parameters(), strict=False)
                    curve.append((step, held_out_loss(evaluated)))
                state = {"step": step, "curve": curve, "interruptions": interruptions}
                if step in branches and folder is not None:
                    Checkpoint(branch_path(plan, step, folder), 0.0).write({**replicas.state(), **state})
                if checkpoint.is_due or step == until:
                    checkpoint.write({**replicas.state(), **state, "cpu_s": cpu_s + time.process_time()})
            if step == until:
                break
            if step < plan.steps:
                replicas.step(step)
        replicas.close()
    if until is None:
        checkpoint.remove()
    return Trained(
        plan=plan,
        n_parameters=sum(p.numel() for p in evaluated.parameters()),
        tokens=plan.n * plan.steps * BATCH * SIZES[plan.size].context,
        curve=curve,
        bytes_up=replicas.bytes_up // plan.n,
        bytes_down=replicas.bytes_down // plan.n,
        cpu_s=round(cpu_s + time.process_time(), 1),
        interruptions=interruptions,
        corpus=corpus().digest,
        machine=machine(),
    )


def machine() -> str:
    """Return the processor and the versions, for the results."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    name = processor or platform.processor() or platform.machine()
    return f"{name}, Python {platform.python_version()}, torch {torch.__version__}"


# -- the grid ----------------------------------------------------------------------------------------------------------


def outer_of(chosen: str, inner_steps: int, steps: int) -> str:
    """Return an outer learning rate and momentum with a comma between them.

    A run keeps the numbers, because the defaults of `DiLoCo` may change.

    Args:
        chosen: the two values, or `DEFAULT_OUTER` for those that `DiLoCo` would choose.
        inner_steps: inner steps of a round.
        steps: inner steps with rounds.
    """
    if chosen != DEFAULT_OUTER:
        return chosen
    lr, momentum = default_outer(inner_steps, math.ceil(steps / inner_steps))
    return f"{lr},{momentum}"


def grid(chosen: argparse.Namespace) -> Iterator[Plan]:
    """Yield the runs that the options choose: runs without rounds first, and all wires for one number of replicas."""
    for seed in range(chosen.seeds):
        for size in chosen.sizes:
            steps = chosen.steps or SIZES[size].steps
            yield Plan(size, "alone", 1, 0, "", seed, steps)
            for n in chosen.replicas:
                yield Plan(size, "data-parallel", n, 0, "", seed, steps)
            for n in chosen.replicas:
                for inner_steps in chosen.inner_steps:
                    wires = chosen.wires if (n, inner_steps) == (chosen.wires_n, chosen.wires_inner_steps) else ["fp32"]
                    for wire in wires:
                        for after, given in product(chosen.pretrained, chosen.outer):
                            outer = outer_of(given, inner_steps, steps - after)
                            yield Plan(size, "diloco", n, inner_steps, wire, seed, steps, after, outer)


def read_runs(path: Path) -> list[Trained]:
    """Return the finished runs of a file: one run in each line, or the document that `--write` makes."""
    text = path.read_text() if path.exists() else ""
    rows = json.loads(text)["runs"] if path.suffix == ".json" and text else map(json.loads, text.splitlines())
    return [
        Trained(
            plan=Plan(**row["plan"]),
            curve=[(int(step), float(loss)) for step, loss in row["curve"]],
            **{name: value for name, value in row.items() if name not in ("plan", "curve")},
        )
        for row in rows
    ]


def document(runs: Sequence[Trained]) -> dict[str, Any]:
    """Return the content of `docs/results/scaling.json`: the command and all runs."""
    ordered = sorted(runs, key=lambda run: (run.n_parameters, run.plan.name, run.corpus))
    return {"command": COMMAND, "runs": [asdict(run) for run in ordered]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure how DiLoCo scales with the size of the model.")
    parser.add_argument(
        "--lines", type=Path, required=True, metavar="FILE", help="the finished runs, one line for each"
    )
    parser.add_argument(
        "--finished", type=Path, metavar="FILE", help="a file of --write; its runs on the same text are not repeated"
    )
    parser.add_argument("--sizes", nargs="+", default=[*SIZES], choices=[*SIZES], help="default: all")
    parser.add_argument("--replicas", nargs="+", type=int, default=[2, 4, 8], metavar="N", help="default: 2, 4 and 8")
    parser.add_argument(
        "--inner-steps", nargs="+", type=int, default=[10, 50, 200], metavar="H", help="default: 10, 50 and 200"
    )
    parser.add_argument(
        "--wires",
        nargs="+",
        default=["fp32", "int8", "int4", "top8", "top8,each"],
        metavar="WIRE",
        help="wires at --wires-n and --wires-inner-steps, the wire of the means after a comma; default: all",
    )
    parser.add_argument("--wires-n", type=int, default=4, metavar="N", help="default: 4")
    parser.add_argument("--wires-inner-steps", type=int, default=50, metavar="H", help="default: 50")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 0 to N - 1; default: 1")
    parser.add_argument("--steps", type=int, metavar="N", help="inner steps of each replica; default: by size")
    parser.add_argument(
        "--pretrained",
        nargs="+",
        type=int,
        default=[0],
        metavar="STEPS",
        help="the first steps that are data-parallel in runs of DiLoCo, one run for each value; default: 0",
    )
    parser.add_argument(
        "--outer",
        nargs="+",
        default=[DEFAULT_OUTER],
        metavar="LR,MOMENTUM",
        help="outer learning rate and momentum, one run for each value; default: default, as DiLoCo chooses them",
    )
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="runs at a time; default: 1")
    parser.add_argument("--no-more", action="store_true", help="start no run")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write all finished runs to this file")
    chosen = parser.parse_args(arguments)
    finished = [*read_runs(chosen.lines), *(read_runs(chosen.finished) if chosen.finished else ())]
    found = {(run.plan, run.corpus): run for run in finished}
    if not chosen.no_more:
        folder = chosen.lines.with_suffix(".checkpoints")
        folder.mkdir(exist_ok=True)
        left = [plan for plan in grid(chosen) if (plan, corpus().digest) not in found]
        carry_out = partial(train, folder=folder, branches=[step for step in chosen.pretrained if step])
        # Data-parallel runs come first, because they keep the states from which pretrained runs begin.
        for is_first in (True, False):
            plans = [plan for plan in left if (plan.way != "diloco") == is_first]
            for run in in_processes(carry_out, plans, chosen.processes):
                found[run.plan, run.corpus] = run
                with chosen.lines.open("a") as file:
                    file.write(json.dumps(asdict(run)) + "\n")
                print(f"{run.plan.name}: {run.loss:.4f} in {run.cpu_s:.0f} s", file=sys.stderr, flush=True)
    if chosen.write is not None:
        chosen.write.write_text(json.dumps(document([*found.values()]), indent=1) + "\n")


if __name__ == "__main__":
    main()
