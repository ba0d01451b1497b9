"""The task of the replica in the benchmark of recovery: train with a large state, and time the parts of a restart."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from executors import current_replica

N_TENSORS = 32


class Meter:
    """Adds up the seconds in which at least one call ran, and the bytes that the calls returned."""

    def __init__(self) -> None:
        self.seconds, self.n_bytes = 0.0, 0
        self._running, self._since_s = 0, 0.0
        self._lock = threading.Lock()

    def timed(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                if not self._running:
                    self._since_s = time.perf_counter()
                self._running += 1
            found = None
            try:
                found = act(*arguments, **options)
                return found
            finally:
                with self._lock:
                    self._running -= 1
                    self.n_bytes += len(found) if isinstance(found, memoryview) else 0
                    if not self._running:
                        self.seconds += time.perf_counter() - self._since_s

        return call


def train(folder: str, state_bytes: int) -> None:
    """Train until `folder/stop` exists. Each attempt writes the times of its first step into `folder/ATTEMPT`.

    Args:
        folder: the folder of the benchmark.
        state_bytes: the bytes of the parameters and of AdamW's state together.
    """
    entered = time.monotonic()
    import torch

    from diloco import DiLoCo
    from diloco.rendezvous import envelope

    torch.set_num_threads(2)
    replica = current_replica()
    reading, proving, either = Meter(), Meter(), Meter()
    kind: Any = type(replica.store)
    kind.get = either.timed(reading.timed(kind.get))
    digest = "xxh3_128_hexdigest"  # not a public name of the module
    setattr(envelope, digest, either.timed(proving.timed(getattr(envelope, digest))))

    model = torch.nn.ParameterList(torch.zeros(state_bytes // 12 // N_TENSORS) for _ in range(N_TENSORS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    built = time.monotonic()
    with DiLoCo(model, inner_steps=2, snapshot_every=1, same_data="allow") as diloco:
        diloco.attach_state("optimizer", optimizer)
        opened = time.monotonic()
        times = {"entered": entered, "built": built, "opened": opened, "bytes": reading.n_bytes}
        times |= {"reading": reading.seconds, "proving": proving.seconds, "either": either.seconds}
        while not Path(folder, "stop").exists():
            for parameter in model:
                if parameter.grad is None:
                    parameter.grad = torch.full_like(parameter, 1e-3)
            optimizer.step()
            if "stepped" not in times:
                times |= {"stepped": time.monotonic(), "rounds": diloco.rounds}
                _write(Path(folder, str(replica.attempt)), times)
            diloco.step()
            _write(Path(folder, "rounds"), {"rounds": diloco.rounds, "pid": os.getpid(), "attempt": replica.attempt})


def _write(path: Path, fields: dict[str, Any]) -> None:
    """Write a file as a whole, so that no reader sees a part of it."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(fields))
    new.replace(path)
