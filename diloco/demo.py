"""The default task: replicas train one small transformer on source code, and it learns to write Python.

The text is the source of the running Python's standard library. Each replica gets a share, and some of it is held out.
Nothing is downloaded. The settings are known to work from a cold start: rounds of ten steps, outer learning rate 0.7,
momentum 0.8 that grows over half of the rounds, and a plain average at the end.
"""

from __future__ import annotations

import math
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from executors.errors import raise_missing_package

try:
    import torch
    from torch import Tensor, nn
    from torch.nn import functional
    from xxhash import xxh3_128
except ImportError as error:  # the demo is the first command of many users, who may have installed no extra
    raise_missing_package("The demo", error, "diloco")

from diloco.outer import DiLoCo
from diloco.rendezvous.round import RoundReport
from executors.replica import Replica, current_replica

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.8
"""The outer settings of the demo.

In its many rounds of ten steps, these values reach a lower loss on average than the defaults for short plans.
"""
INNER_LR, INNER_WARMUP_STEPS = 3e-3, 40
MAX_BYTES = 24 << 20
HELD_OUT = 20
"""One in this number of chunks is held out for evaluation."""
CHUNK_BYTES = 8 << 10
SHORTEST_BYTES = 1 << 10


class Block(nn.Module):
    """One layer of the transformer: attention to earlier bytes, and a feed-forward network.

    Args:
        width: features of each byte.
        heads: heads of the attention.

    Example:
        Block(64, 2)(torch.zeros(1, 16, 64))
    """

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
    """A small transformer that predicts the next byte of a text.

    Args:
        width: features of each byte.
        layers: the number of layers.
        heads: heads of the attention.
        context: bytes that a prediction can see.

    Example:
        ByteTransformer().write(b"def ", 200, seed=0)
    """

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
        """Return the mean loss in nats per byte.

        Args:
            windows: (batch, context + 1), bytes of the text.
        """
        logits = self(windows[:, :-1])
        return functional.cross_entropy(logits.reshape(-1, 256), windows[:, 1:].reshape(-1))

    @torch.no_grad()
    def write(self, prompt: bytes, n_bytes: int, seed: int) -> str:
        """Return a continuation of a text.

        Args:
            prompt: the beginning.
            n_bytes: bytes to add.
            seed: seed of the random choices.
        """
        generator = torch.Generator().manual_seed(seed)
        tokens = list(prompt)
        for _ in range(n_bytes):
            logits = self(torch.tensor([tokens[-self.context :]]))[0, -1]
            tokens.append(int(torch.multinomial(functional.softmax(logits / 0.7, dim=-1), 1, generator=generator)))
        return bytes(tokens).decode(errors="replace")


class Inner:
    """The inner steps of one replica: AdamW with a warm-up and a cosine, on random batches of the replica's share.

    Args:
        text: the text.
        rank: the replica, which decides its share.
        world_size: the number of shares.
        steps: planned steps, which the learning rate follows.
        batch: windows in a batch.
        seed: seed of the model and of the batches.

    Example:
        Inner(load_text(), 0, 1, steps=1000, batch=8, seed=0).step(0)
    """

    def __init__(self, text: Text, rank: int, world_size: int, *, steps: int, batch: int, seed: int) -> None:
        self.model = _new_model(seed)
        self._text = text.share(rank, world_size)
        self._steps, self._batch = steps, batch
        self._optimizer = torch.optim.AdamW(self.model.parameters(), INNER_LR)
        self._generator = torch.Generator().manual_seed(1000 * seed + rank)

    def windows(self) -> Tensor:
        """Return the next random batch, (batch, context + 1)."""
        return _windows(self._text, self._batch, self.model.context, self._generator)

    def step(self, step: int, windows: Tensor | None = None) -> float:
        """Make one step, and return the loss before it.

        Args:
            step: the number of the step, counted from 0.
            windows: the batch. None: the next random batch.
        """
        progress = min(1.0, step / max(1, self._steps))
        rate = INNER_LR * min(1.0, (step + 1) / INNER_WARMUP_STEPS) * (0.55 + 0.45 * math.cos(math.pi * progress))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        loss = self.model.loss(self.windows() if windows is None else windows)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()


def _windows(text: Tensor, count: int, context: int, generator: torch.Generator) -> Tensor:
    """Return random windows of context + 1 bytes of a text."""
    starts = torch.randint(len(text) - context, (count,), generator=generator)
    return torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()


def _new_model(seed: int) -> ByteTransformer:
    torch.manual_seed(seed)
    return ByteTransformer()


def train(
    *,
    steps: int = 1000,
    inner_steps: int = 10,
    data: str | None = None,
    compare: bool = False,
    seed: int = 0,
    batch: int = 8,
) -> dict[str, Any]:
    """Train the demo's model together with the other replicas of the run.

        replicas launch --n 4 --arg steps=400 --arg compare=true

    Args:
        steps: inner steps of each replica, at least 1.
        inner_steps: steps from one round to the next, at least 1.
        data: a file, or a folder of which every file is read. None: Python's standard library.
        compare: True: rank 0 also trains one replica alone, and data-parallel on the tokens of all replicas. It reports
            the three losses.
        seed: seed of the model and of the order of the data.
        batch: windows in each step of a replica, at least 1.

    Returns:
        Numbers about the training, and `anchor`, a digest of the shared parameters. Rank 0 adds `summary`, a text; if
        rank 0 was not in the last round, the lowest rank in it does.

    Raises:
        ValueError: a number is smaller than 1, or the text is too short.
        FileNotFoundError: there is no file or folder at `data`.
    """
    for name, value in {"steps": steps, "inner_steps": inner_steps, "batch": batch}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {name}={value!r}.")
    replica = current_replica()
    text = load_text(data)
    new_inner = partial(Inner, text, world_size=replica.world_size, steps=steps, batch=batch, seed=seed)
    inner = new_inner(replica.rank)
    model = inner.model
    diloco = DiLoCo(
        model,
        inner_steps=min(inner_steps, steps),
        outer_lr=OUTER_LR,
        outer_momentum=OUTER_MOMENTUM,
        total_steps=steps,
    )
    began = time.monotonic()
    reports: list[RoundReport] = []
    with diloco:
        before = held_out_loss(model, text) if replica.rank == 0 else math.nan
        for step in diloco.steps():
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
    digest = xxh3_128(b"".join(values.numpy().tobytes() for values in anchor.values())).hexdigest()
    in_rounds = sum(r.wait_s + r.move_s + r.reduce_s + r.step_s for r in reports)
    result: dict[str, Any] = {
        "steps": steps,
        "anchor": digest,
        "rounds": diloco.rounds,
        "seconds": round(seconds, 2),
        "seconds_in_rounds": round(in_rounds, 2),
        "seconds_waiting": round(sum(r.wait_s for r in reports), 2),
        "bytes_up": sum(r.bytes_up for r in reports),
        "bytes_down": sum(r.bytes_down for r in reports),
    }
    device = next(model.parameters()).device
    print(f"done: {steps} steps, {diloco.rounds} rounds in {seconds:.1f} s on the device {device}", flush=True)
    last_ranks = reports[-1].ranks if reports else (replica.rank,)
    if replica.rank in (0, min(last_ranks)):
        if math.isnan(before):
            before = held_out_loss(_new_model(seed), text)  # rank 0 has measured the loss before, and has left the run
        result |= {"loss_before": before, "loss": held_out_loss(model, text)}
        if compare:
            result |= _compare(text, replica, new_inner, steps)
        result["summary"] = _summary(result, model, replica.world_size, len(last_ranks), text, seed)
    return result


def held_out_loss(model: ByteTransformer, text: Text) -> float:
    """Return the mean loss on the held-out text. Each call uses the same windows.

    Args:
        model: the model.
        text: the text.

    Example:
        held_out_loss(ByteTransformer(), load_text())  # about 5.8 before training
    """
    windows = _windows(text.held_out, 512, model.context, torch.Generator().manual_seed(1))
    with torch.no_grad():
        losses = [model.loss(part).item() for part in torch.split(windows, 64)]
    return sum(losses) / len(losses)


def _compare(text: Text, replica: Replica, new_inner: Callable[[int], Inner], steps: int) -> dict[str, float]:
    """Train one replica alone on its share, and one process on the batches of all replicas. Return both losses."""
    print("training one replica alone, to compare", flush=True)
    alone = new_inner(replica.rank)
    for step in range(steps):
        alone.step(step)
    print("training data-parallel, to compare", flush=True)
    together = [new_inner(rank) for rank in range(replica.world_size)]
    for step in range(steps):
        together[0].step(step, torch.cat([inner.windows() for inner in together]))
    return {
        "loss_alone": held_out_loss(alone.model, text),
        "loss_data_parallel": held_out_loss(together[0].model, text),
    }


def _summary(result: dict[str, Any], model: ByteTransformer, world_size: int, left: int, text: Text, seed: int) -> str:
    up, down, waiting = result["bytes_up"] / 1e6, result["bytes_down"] / 1e6, result["seconds_waiting"]
    seconds = max(result["seconds"], 0.01)
    n_parameters = sum(p.numel() for p in model.parameters())
    lines = [
        f"{_count(world_size, 'replica')} trained one transformer of {n_parameters:,} parameters on {text.name}.",
        f"Held-out loss {result['loss_before']:.3f} -> {result['loss']:.3f} nats per byte.",
    ]
    if left < world_size:
        was = "was" if left == 1 else "were"
        lines.append(f"{left} of them {was} in the last round. The others were lost or late.")
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
        f"{(result['seconds_in_rounds'] - waiting) / seconds:.1%} of the time went into rounds, "
        f"{waiting / seconds:.1%} into waiting for other replicas.",
        "It writes:",
    ]
    written = model.write(b"def ", 200, seed)
    lines += ["    " + "".join(c if " " <= c <= "~" else "." for c in line) for line in written.splitlines()]
    return "\n".join(lines)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


@dataclass(frozen=True)
class Text:
    """The bytes to train on, and the bytes to evaluate on.

    Attributes:
        name: the name of the text, for messages.
        training: chunks of bytes.
        held_out: the held-out bytes.
    """

    name: str
    training: tuple[Tensor, ...]  # each chunk is an array of uint8
    held_out: Tensor  # (n,) uint8

    def share(self, rank: int, world_size: int) -> Tensor:
        """Return the bytes of one replica. If there are too few chunks, several replicas get the same chunk.

        Args:
            rank: the replica.
            world_size: the number of shares.
        """
        chunks = self.training[rank::world_size] or (self.training[rank % len(self.training)],)
        return torch.cat(chunks)


def load_text(data: str | None = None) -> Text:
    """Return the text to train on.

    Args:
        data: a file, or a folder of which every file is read. None: Python's standard library.

    Raises:
        FileNotFoundError: there is no file or folder at `data`.
        ValueError: the text is too short.

    Example:
        load_text("my-notes")
    """
    name, files = _files(data)
    joined = bytearray()
    for file in files:
        joined += file.read_bytes()
        if len(joined) >= MAX_BYTES:
            break
    if len(joined) < SHORTEST_BYTES:
        raise ValueError(
            f"{name} has {len(joined)} bytes of text, and the demo needs at least {SHORTEST_BYTES}. Choose a larger "
            "file or folder."
        )
    # A small text is cut into smaller chunks, so that every replica gets one. A window of 65 bytes must fit into each.
    size = max(130, min(CHUNK_BYTES, len(joined) // (4 * HELD_OUT)))
    chunks = list(torch.split(torch.frombuffer(joined, dtype=torch.uint8)[:MAX_BYTES], size))
    if len(chunks[-1]) < size:
        chunks.pop()
    last = min(HELD_OUT, len(chunks)) - 1
    held_out = chunks[last::HELD_OUT]
    del chunks[last::HELD_OUT]
    return Text(name, tuple(chunks), torch.cat(held_out))


def _files(data: str | None) -> tuple[str, list[Path]]:
    if data is None:
        library = Path(sysconfig.get_path("stdlib"))
        files = [p for p in library.rglob("*.py") if not {"site-packages", "test", "tests"} & set(p.parts)]
        return "the sources of Python's standard library", sorted(files)
    path = Path(data).expanduser()
    if path.is_file():
        return str(path), [path]
    if path.is_dir():
        return str(path), sorted(p for p in path.rglob("*") if p.is_file())
    raise FileNotFoundError(f"data={data!r} names no file or folder. Give the path of a text, or of a folder of texts.")
