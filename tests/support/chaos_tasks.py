"""A small, quick training for tests that kill replicas. It waits at gates until the test opens them."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

N_INPUTS, NOISE = 16, 0.5
START = -1
"""The gate of replicas that start late."""


def train(
    folder: str,
    rounds: int,
    gates: Sequence[int] = (),
    inner_steps: int = 5,
    sharded: bool = False,
    late_ranks: Sequence[int] = (),
    **options: Any,
) -> dict[str, Any]:
    """Fit a line to noisy values with the other replicas.

    Args:
        folder: the folder of the gates.
        gates: rounds at whose beginning a replica waits until the test opens `folder/<round>`.
        sharded: cut the mean into shards, as for a large model.
        late_ranks: replicas that wait at their start until the test opens the gate `START`.
        options: options of DiLoCo.

    Returns:
        The anchor, bit for bit, and its loss on values that no replica has seen. A perfect model has the loss 0.25.
    """
    import torch

    from diloco.outer import open_diloco
    from diloco.rendezvous.round import Limits
    from executors import current_replica

    replica, steps = current_replica(), rounds * inner_steps
    if replica.rank in late_ranks:
        pass_gate(folder, START)
    target = torch.linspace(-1, 1, N_INPUTS)
    model = torch.nn.Linear(N_INPUTS, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(replica.rank)

    def draw(n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(n, N_INPUTS, generator=generator)
        return x, x @ target + NOISE * torch.randn(n, generator=generator)

    shards = {"small_bytes": 0, "block_elements": 8} if sharded else {}
    limits = Limits(grace_s=3.0, takeover_after_s=0.5, round_timeout_s=60.0, **shards)
    closed = list(gates)
    # with a momentum of 0.9, the loss after so few rounds would depend on chance
    options = {"outer_momentum": 0.5, **options}
    with open_diloco(model, inner_steps=inner_steps, total_steps=steps, limits=limits, **options) as diloco:
        diloco.attach_state("optimizer", optimizer)
        diloco.attach_state("data", data)
        for _ in diloco.steps():
            while closed and diloco.rounds >= closed[0]:
                pass_gate(folder, closed.pop(0))
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * (1 - diloco.inner_step / steps)
            x, y = draw(256, data)
            loss = (model(x).squeeze(1) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()
        anchor = diloco.anchor()
    x, y = draw(4096, torch.Generator().manual_seed(1000))
    loss = (x @ anchor["weight"].squeeze(0) + anchor["bias"] - y).square().mean()
    bits = {name: [value.hex() for value in values.flatten().tolist()] for name, values in anchor.items()}
    return {"anchor": bits, "loss": float(loss), "rounds": diloco.rounds}


def pass_gate(folder: str, number: int) -> None:
    with Path(folder, str(number)).open("ab") as gate:
        fcntl.flock(gate, fcntl.LOCK_SH)  # the test holds it while the gate is closed


@contextmanager
def closed_gates(folder: Path, numbers: Sequence[int]) -> Iterator[Callable[[int], None]]:
    """Close gates of a training, and yield a function that opens one of them.

    At the end of the block all gates are opened.
    """
    folder.mkdir()
    with ExitStack() as stack:
        gates = {number: stack.enter_context((folder / str(number)).open("ab")) for number in numbers}
        for gate in gates.values():
            fcntl.flock(gate, fcntl.LOCK_EX)
        yield lambda number: gates[number].close()
