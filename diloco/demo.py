"""The default task: replicas teach one small transformer to write Python.

Text: the sources of the running Python's standard library, each replica its own share, some of it held out. Nothing is
downloaded. The settings were seen to work from a cold start: rounds of ten steps, outer learning rate 0.7, momentum
0.8 ramped over half of the rounds, and a plain average at the end.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from xxhash import xxh3_128

from diloco.demo_data import Text, load_text
from diloco.outer import DiLoCo
from diloco.report import RoundReport
from diloco.settings import FEW_ROUNDS
from executors.replica import current_replica

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.8
INNER_LR, INNER_WARMUP_STEPS = 3e-3, 40


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width)
        batch, time_, width = x.shape
        q, k, v = self.attend(self.norm_1(x)).view(batch, time_, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, time_, width))
        narrowed: Tensor = self.narrow(functional.gelu(self.widen(self.norm_2(x))))
        return x + narrowed


class ByteTransformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 2, context: int = 64) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, time) -> (batch, time, 256)
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, windows: Tensor) -> Tensor:  # (batch, context + 1)
        logits = self(windows[:, :-1])
        return functional.cross_entropy(logits.reshape(-1, 256), windows[:, 1:].reshape(-1))

    @torch.no_grad()
    def write(self, prompt: bytes, n_bytes: int, seed: int) -> str:
        """Continue a text."""
        generator = torch.Generator().manual_seed(seed)
        tokens = list(prompt)
        for _ in range(n_bytes):
            logits = self(torch.tensor([tokens[-self.context :]]))[0, -1]
            tokens.append(int(torch.multinomial(functional.softmax(logits / 0.7, dim=-1), 1, generator=generator)))
        return bytes(tokens).decode(errors="replace")


@dataclass
class Inner:
    """AdamW with a warm-up and a cosine, and the stream of a replica's batches."""

    model: ByteTransformer
    text: Tensor
    steps: int
    batch: int
    seed: int

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), INNER_LR)
        self.generator = torch.Generator().manual_seed(self.seed)

    def windows(self) -> Tensor:
        """Draw a batch of windows of context + 1 bytes."""
        length = self.model.context + 1
        starts = torch.randint(len(self.text) - length + 1, (self.batch,), generator=self.generator)
        return torch.stack([self.text[start : start + length] for start in starts.tolist()]).long()

    def step(self, step: int, windows: Tensor | None = None) -> float:
        """Take one step, counted from 0, and return the loss before it."""
        progress = min(1.0, step / max(1, self.steps))
        rate = INNER_LR * min(1.0, (step + 1) / INNER_WARMUP_STEPS) * (0.55 + 0.45 * math.cos(math.pi * progress))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.model.loss(self.windows() if windows is None else windows)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def train(
    *,
    steps: int = 1000,
    inner_steps: int = 10,
    data: str | None = None,
    compare: bool = False,
    seed: int = 0,
    batch: int = 8,
) -> dict[str, Any]:
    """Train the demo's model with the other replicas of the run.

    Args:
        steps: inner steps of each replica.
        inner_steps: steps between rounds.
        data: a file, or a folder of which every file is read; default: Python's standard library.
        compare: rank 0 also trains alone, and data-parallel on the tokens of all, and shows the three losses.
        seed: of the model and of the order of the data.
        batch: windows per step and replica.

    Returns:
        numbers; `anchor`, a digest of the parameters that all share; and for rank 0 (or the lowest rank that was left
        at the end) `summary`, a text.
    """
    for name, value in {"steps": steps, "inner_steps": inner_steps, "batch": batch}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {name}={value!r}.")
    replica = current_replica()
    text = load_text(data)
    inner = _inner(text, replica.rank, replica.world_size, steps, batch, seed)
    model = inner.model
    few = steps < FEW_ROUNDS * inner_steps  # too few rounds for a momentum: average plainly
    diloco = DiLoCo(
        model,
        inner_steps=min(inner_steps, steps),
        outer_lr=1.0 if few else OUTER_LR,
        outer_momentum=0.0 if few else OUTER_MOMENTUM,
        total_steps=steps,
    )
    began = time.monotonic()
    reports: list[RoundReport] = []
    with diloco:
        before = evaluate(model, text) if replica.rank == 0 else math.nan
        while diloco.inner_step < steps:
            step = diloco.inner_step
            loss = inner.step(step)
            report = diloco.step()
            if report is not None:
                reports.append(report)
            replica.report(step=diloco.inner_step, loss=loss)
            if step % max(1, steps // 10) == 0:
                print(f"step {step:5d} of {steps}  loss {loss:.3f}  rounds {diloco.rounds}", flush=True)
        anchor = diloco.anchor()
    model.load_state_dict(anchor, strict=False)
    seconds = time.monotonic() - began
    result = {"steps": steps, "anchor": _digest(anchor), **_numbers(reports, seconds, diloco.rounds)}
    print(f"done: {steps} steps, {diloco.rounds} rounds in {seconds:.1f} s", flush=True)
    last_ranks = reports[-1].ranks if reports else (replica.rank,)
    if replica.rank in (0, min(last_ranks)):
        if math.isnan(before):
            before = evaluate(_new_model(seed), text)  # rank 0, who would have told, is gone
        result |= {"loss_before": before, "loss": evaluate(model, text)}
        if compare:
            result |= _compare(text, replica.rank, replica.world_size, steps, batch, seed)
        result["summary"] = _summary(result, model, replica.world_size, len(last_ranks), text, seed)
    return result


def evaluate(model: ByteTransformer, text: Text) -> float:
    """Return the mean loss over the held-out text, the same windows each time."""
    generator = torch.Generator().manual_seed(1)
    length = model.context + 1
    starts = torch.randint(len(text.held_out) - length + 1, (512,), generator=generator)
    windows = torch.stack([text.held_out[start : start + length] for start in starts.tolist()]).long()
    with torch.no_grad():
        losses = [model.loss(part).item() for part in torch.split(windows, 64)]
    return sum(losses) / len(losses)


def _digest(anchor: dict[str, Tensor]) -> str:
    """Equal for replicas that hold the same parameters, bit for bit."""
    digest = xxh3_128()
    for values in anchor.values():
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def _new_model(seed: int) -> ByteTransformer:
    torch.manual_seed(seed)
    return ByteTransformer()


def _inner(text: Text, rank: int, world_size: int, steps: int, batch: int, seed: int) -> Inner:
    return Inner(_new_model(seed), text.share(rank, world_size), steps, batch, seed=1000 * seed + rank)


def _compare(text: Text, rank: int, world_size: int, steps: int, batch: int, seed: int) -> dict[str, float]:
    """Train one replica alone on its share, and one process on the batches of all."""
    alone = _inner(text, rank, world_size, steps, batch, seed)
    print("training one replica alone, to compare", flush=True)
    for step in range(steps):
        alone.step(step)
    together = [_inner(text, r, world_size, steps, batch, seed) for r in range(world_size)]
    print("training data-parallel, to compare", flush=True)
    for step in range(steps):
        together[0].step(step, torch.cat([inner.windows() for inner in together]))
    return {"loss_alone": evaluate(alone.model, text), "loss_data_parallel": evaluate(together[0].model, text)}


def _numbers(reports: list[RoundReport], seconds: float, rounds: int) -> dict[str, Any]:
    in_rounds = sum(r.wait_s + r.move_s + r.reduce_s + r.step_s for r in reports)
    return {
        "rounds": rounds,
        "seconds": round(seconds, 2),
        "seconds_in_rounds": round(in_rounds, 2),
        "seconds_waiting": round(sum(r.wait_s for r in reports), 2),
        "bytes_up": sum(r.bytes_up for r in reports),
        "bytes_down": sum(r.bytes_down for r in reports),
    }


def _summary(result: dict[str, Any], model: ByteTransformer, world_size: int, left: int, text: Text, seed: int) -> str:
    up, down = result["bytes_up"] / 1e6, result["bytes_down"] / 1e6
    moving = result["seconds_in_rounds"] - result["seconds_waiting"]
    seconds = max(result["seconds"], 0.01)
    n_parameters = sum(p.numel() for p in model.parameters())
    lines = [
        f"{_count(world_size, 'replica')} trained one transformer of {n_parameters:,} parameters on {text.name}.",
        f"Held-out loss {result['loss_before']:.3f} -> {result['loss']:.3f} nats per byte.",
    ]
    if left < world_size:
        lines.append(f"{left} of them were there for the last round; the others were gone or late.")
    if "loss_alone" in result:
        alone, parallel = result["loss_alone"], result["loss_data_parallel"]
        lines += [
            f"  together, DiLoCo        {result['loss']:.3f}",
            f"  one replica alone       {alone:.3f}  (DiLoCo is {result['loss'] / alone:.2f} times that)",
            f"  data-parallel           {parallel:.3f}  (DiLoCo is {result['loss'] / parallel:.2f} times that)",
        ]
    lines += [
        f"{_count(result['rounds'], 'round')} moved {up:.1f} MB up and {down:.1f} MB down per replica; "
        f"data-parallel would have moved {4e-6 * n_parameters * result['steps']:.0f} MB each way.",
        f"{moving / seconds:.1%} of the time went into rounds, {result['seconds_waiting'] / seconds:.1%} into waiting "
        "for other replicas.",
        "It writes:",
    ]
    written = model.write(b"def ", 200, seed)
    lines += ["    " + "".join(c if " " <= c <= "~" else "." for c in line) for line in written.splitlines()]
    return "\n".join(lines)


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
