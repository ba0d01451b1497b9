"""DiLoCo compared with a reference written from the papers, and mistakes of other implementations."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from support.training import PLAIN, leave, next_process, nudge, place
from torch import nn

from diloco.fragments import Fragment
from diloco.outer import open_diloco
from diloco.outer_optimizer import NesterovSGD, Schedule
from diloco.rendezvous.round import Limits
from diloco.rendezvous.training_state import Verdict
from diloco.testing import run_replicas
from diloco.wires import DEFAULT_MEAN_WIRE
from executors.store import MemoryStore
from executors.testing.helpers import environment

SHARDED = Limits(small_bytes=0, block_elements=16)
"""Limits with which even a tiny payload is cut into shards."""
# If no total of steps is given, staggered fragments end with steps that no round has averaged.
pytestmark = pytest.mark.filterwarnings("ignore:.* in no average")
PAPER: dict[str, Any] = {"momentum_warmup": 0, "final_average": False}


class ThreeLayers(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(5, 3))
        self.layers = nn.ModuleList(nn.Linear(3, 4) for _ in range(3))
        own = torch.Generator().manual_seed(seed)  # replicas are threads here, and the global generator is shared
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=own)


def pull(rank: int, step: int, name: str, shape: torch.Size) -> torch.Tensor:
    """Return the target of a replica at a step. It differs for all replicas."""
    rng = np.random.default_rng([rank, step, *name.encode()])
    return torch.from_numpy(rng.normal(rank, 1.0, tuple(shape)).astype(np.float32))


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    loss = sum(((p - pull(rank, step, name, p.shape)) ** 2).sum() for name, p in model.named_parameters())
    assert isinstance(loss, torch.Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


INNER_LR = 0.03


def reference(
    n: int,
    groups: list[list[str]],
    *,
    steps: int,
    per_entry: int,
    tau: int,
    mix: float,
    eta: float,
    mu: Callable[[int], float],
    nesterov: bool,
) -> dict[str, torch.Tensor]:
    """Return the anchor of Streaming DiLoCo (arXiv 2501.18512, algorithm 2) in float64, for quadratic losses."""
    anchor = {name: p.detach().double() for name, p in ThreeLayers(0).named_parameters()}
    live = [dict(anchor) for _ in range(n)]
    velocity: dict[str, torch.Tensor] = {}
    sent: dict[str, torch.Tensor] = {}
    for t in range(1, steps + 1):
        for m in range(n):
            for name, theta in live[m].items():
                gradient = 2 * (theta - pull(m, t, name, theta.shape).double())
                live[m][name] = theta - INNER_LR * gradient
        if (t + tau) % per_entry == 0:
            for name in groups[((t + tau) // per_entry - 1) % len(groups)]:
                sent[name] = torch.stack([anchor[name] - live[m][name] for m in range(n)]).mean(0)
        if t % per_entry == 0:
            entry = t // per_entry - 1
            momentum = mu(entry // len(groups))
            for name in groups[entry % len(groups)]:
                velocity[name] = momentum * velocity[name] + sent[name] if name in velocity else sent[name]
                direction = sent[name] + momentum * velocity[name] if nesterov else velocity[name]
                anchor[name] = anchor[name] - eta * direction
                for m in range(n):
                    live[m][name] = mix * live[m][name] + (1 - mix) * anchor[name]
    return anchor


def groups_of(n_fragments: int) -> list[list[str]]:
    names = [name for name, _ in ThreeLayers(0).named_parameters()]
    return [names[index::n_fragments] for index in range(n_fragments)]


def train(where: Mapping[str, Any], steps: int, **options: Any) -> tuple[dict[str, torch.Tensor], list[Any]]:
    model = ThreeLayers(where["rank"])
    optimizer = torch.optim.SGD(model.parameters(), INNER_LR)
    history = []
    with open_diloco(model, **options, **where) as diloco:
        for step in range(1, steps + 1):
            inner_step(model, optimizer, where["rank"], step)
            if diloco.step() is not None:
                history.append({name: value.numpy().tobytes() for name, value in diloco.anchor().items()})
        return diloco.anchor(), history


SETTINGS = list(itertools.product((0, 1), (0.0, 0.5, 1.0), (True, False)))


@pytest.mark.parametrize("n_fragments", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_agrees_with_the_papers_over_twenty_rounds(n: int, n_fragments: int) -> None:
    for tau, mix, nesterov in SETTINGS[(2 * n + n_fragments) % 5 :: 5]:  # together, the cases have all settings
        agree_with_the_papers(n, n_fragments, tau, mix, nesterov=nesterov)


def agree_with_the_papers(n: int, n_fragments: int, tau: int, mix: float, *, nesterov: bool) -> None:
    case = f"tau={tau} mix={mix} nesterov={nesterov}"
    per_entry, steps = 2, 40
    groups = groups_of(n_fragments)
    options: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.8, "momentum_warmup": 5, "final_average": False}
    if not nesterov:
        options = {"outer_optimizer": lambda parameters: torch.optim.SGD(parameters, 0.7, momentum=0.8)}

    results = run_replicas(
        n,
        lambda where: train(
            where,
            steps,
            inner_steps=per_entry * n_fragments,
            fragments=groups,
            overlap_steps=tau,
            mix=mix,
            limits=SHARDED if (n + tau) % 2 else None,
            **options,
        ),
    )

    for entry, anchors in enumerate(zip(*(history for _, history in results), strict=True)):
        assert all(anchor == anchors[0] for anchor in anchors), f"anchors differ after entry {entry}: {case}"
    assert len(results[0][1]) == 20
    expected = reference(
        n,
        groups,
        steps=steps,
        per_entry=per_entry,
        tau=tau,
        mix=mix,
        eta=0.7,
        mu=lambda r: 0.8 * min(1.0, r / 5) if nesterov else 0.8,
        nesterov=nesterov,
    )
    for name, value in results[0][0].items():
        assert torch.allclose(value.double(), expected[name], rtol=2e-5, atol=2e-5), f"{name}: {case}"


def test_the_outer_step_is_that_of_torch_sgd_with_nesterov() -> None:
    parameter = nn.Parameter(torch.zeros(300_000))
    torch_sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    pulls = [torch.randn(300_000) for _ in range(6)]

    def body(where: Mapping[str, Any]) -> torch.Tensor:
        model = nn.Module()
        model.p = nn.Parameter(torch.zeros(300_000))
        with open_diloco(model, inner_steps=1, **PAPER, **where) as diloco:
            for step in pulls:
                with torch.no_grad():
                    model.get_parameter("p").sub_(step)
                diloco.step()
            return diloco.anchor()["p"]

    for step in pulls:
        parameter.grad = step.clone()
        torch_sgd.step()
    torch.testing.assert_close(run_replicas(1, body)[0], parameter.detach(), rtol=1e-5, atol=1e-5)


def test_a_constant_pull_gains_seven_over_time() -> None:
    steps = constant_pull()
    assert steps[:3] == pytest.approx([1.33, 1.897, 2.4073], abs=1e-4)
    assert steps[-1] == pytest.approx(7.0, abs=0.02)


def constant_pull() -> list[float]:
    def body(where: Mapping[str, Any]) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        moves = []
        with open_diloco(model, inner_steps=1, **PAPER, **where) as diloco:
            for _ in range(60):
                before = diloco.anchor()["weight"].item()
                with torch.no_grad():
                    model.weight.sub_(1.0)
                diloco.step()
                moves.append(before - diloco.anchor()["weight"].item())
        return moves

    return run_replicas(1, body)[0]


def test_alone_with_eta_one_and_no_momentum_it_is_plain_training() -> None:
    plain = ThreeLayers(0)
    optimizer = torch.optim.AdamW(plain.parameters(), 0.01)
    for step in range(1, 31):
        inner_step(plain, optimizer, 0, step)

    def body(where: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        model = ThreeLayers(0)
        inner = torch.optim.AdamW(model.parameters(), 0.01)
        with open_diloco(model, inner_steps=3, outer_lr=1.0, outer_momentum=0.0, **where) as diloco:
            for step in range(1, 31):
                inner_step(model, inner, 0, step)
                diloco.step()
        return dict(model.named_parameters())

    for name, value in run_replicas(1, body)[0].items():
        torch.testing.assert_close(value, plain.get_parameter(name))


@pytest.fixture
def _defaults_are_restored() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.mark.usefixtures("_defaults_are_restored")
@pytest.mark.parametrize("options", [{}, {"overlap_steps": 1, "wire": "int8", "merge": "carry"}])
@pytest.mark.parametrize("set_default", [
    lambda: torch.set_default_dtype(torch.bfloat16), lambda: torch.set_default_dtype(torch.float64),
    lambda: torch.set_default_device("meta"),
])  # fmt: skip
def test_the_anchor_is_float32_on_the_cpu_whatever_torch_makes_by_default(
    set_default: Callable[[], object], options: dict[str, Any]
) -> None:
    def trained(models: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
        store = MemoryStore()
        # the second attempt continues with the saved state of the first
        for model, n_steps in zip(models, (5, 4), strict=True):
            next_process()
            diloco = open_diloco(model, inner_steps=2, snapshot_every=1, **options, **place(store))
            diloco.attach_state("generator", torch.Generator())
            for _ in range(n_steps):
                nudge(model, 0.25)
                diloco.step()
            leave(diloco)
            diloco._workers.uploads.finish()
        return {**diloco.anchor(), "momentum": diloco._model_state.anchor.outer[0].state_dict()["momentum"]}

    models = [ThreeLayers(0).to(torch.bfloat16) for _ in range(4)]
    for model in models:
        model.register_buffer("order", torch.arange(8))
    expected = trained(models[:2])
    set_default()
    for name, value in trained(models[2:]).items():
        assert (value.dtype, value.device.type) == (torch.float32, "cpu")
        assert torch.equal(value, expected[name])


def test_a_given_outer_optimizer_creates_its_state_on_the_cpu_whatever_torch_makes_by_default() -> None:
    def trained(models: Sequence[nn.Module], device: str) -> dict[str, torch.Tensor]:
        store = MemoryStore()
        with torch.device(device):
            # the second attempt loads the optimizer's state from a snapshot
            for model in models:
                next_process()
                diloco = open_diloco(
                    model, inner_steps=2, snapshot_every=1, outer_optimizer=torch.optim.Adagrad, **place(store)
                )
                for _ in range(4):
                    nudge(model, 0.25)
                    diloco.step()
                leave(diloco)
                diloco._workers.uploads.finish()
        return diloco.anchor()

    models = [ThreeLayers(0) for _ in range(4)]
    expected = trained(models[:2], "cpu")
    for name, value in trained(models[2:], "meta").items():
        assert torch.equal(value, expected[name])


def test_the_loss_falls() -> None:
    def body(where: Mapping[str, Any]) -> list[float]:
        draw = torch.Generator().manual_seed(where["rank"])
        model = nn.Linear(4, 1)
        truth = torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
        optimizer = torch.optim.SGD(model.parameters(), 0.02)
        losses = []
        with open_diloco(model, inner_steps=5, **where) as diloco:
            for _ in range(100):
                x = torch.randn(16, 4, generator=draw)
                loss = nn.functional.mse_loss(model(x), x @ truth)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                diloco.step()
        return losses

    for losses in run_replicas(3, body):
        assert sum(losses[-10:]) < 0.1 * sum(losses[:10])


def test_work_that_no_seal_counted_stays_in_the_live_parameters_unless_it_is_dropped() -> None:
    late: Any
    for late, kept in (("carry", 1.0), ("drop", 0.0)):
        model = nn.Linear(2, 1, bias=False)
        with open_diloco(model, inner_steps=1, late=late, **PLAIN, **place()) as diloco:
            start = diloco.anchor()["weight"]
            nudge(model, 1.0)
            mean = torch.full((2,), -0.25).numpy().data.cast("B")
            diloco._model_state.apply(0, [mean], Verdict.KEPT, None, partly=False)
            diloco._model_state.merge()
            torch.testing.assert_close(diloco.anchor()["weight"], start + 0.25)
            torch.testing.assert_close(model.weight.detach(), start + 0.25 + kept)


def test_the_ramp_and_the_final_average_follow_the_plan() -> None:
    schedule = Schedule(lr=0.7, momentum=0.8, warmup=4, n_fragments=2, is_average=lambda entry: 17 < entry <= 19)
    assert [schedule.at(k) for k in (0, 1)] == [(0.7, 0.0)] * 2
    assert schedule.at(5)[1] == pytest.approx(0.4)
    assert schedule.at(9) == schedule.at(17) == (0.7, 0.8)
    assert schedule.at(18) == schedule.at(19) == (1.0, 0.0)
    assert schedule.at(20) == (0.7, 0.8)


ROUND_DIGESTS = """
import os, sys, numpy as np, torch
from torch import nn
from diloco.fragments import plan_fragments
from diloco.outer_optimizer import NesterovSGD, Schedule
from diloco.live_parameters import live_tensors, pack
from diloco.rendezvous.reduction import BlockFormat, ShardInput, weighted_mean
from diloco.rendezvous.envelope import UNSIGNED
from diloco.wires import DEFAULT_MEAN_WIRE, WIRES
from diloco.wires.wire import blocks_of, decoded
for capability in sys.argv[1:]:
    if os.fork() == 0:
        os.environ["ATEN_CPU_CAPABILITY"] = capability  # which torch looks at in its first operation
        break
    assert os.wait()[1] == 0
else:
    os._exit(0)
torch.set_num_threads(1)
n, block = 70_003, 66_000
rng = np.random.default_rng(0)
def values():
    return np.ldexp(rng.integers(-(1 << 23), 1 << 23, n), rng.integers(-40, -20, n)).astype(np.float32)
print(torch.backends.cpu.get_cpu_capability())
for name, mean_name in DEFAULT_MEAN_WIRE.items():
    wire, mean_wire = WIRES[name], WIRES[mean_name]
    model = nn.Module()
    model.flat = nn.Parameter(torch.from_numpy(values()))
    (fragment,) = plan_fragments(model, 1, sync_buffers=False)
    anchor = torch.from_numpy(values())
    outer = NesterovSGD(fragment, anchor, Schedule(0.7, 0.9, 3, 1))
    for entry in range(3):
        inputs = []
        for rank in range(3):
            model.flat.data.copy_(torch.from_numpy(values()))
            *_, last = blocks_of(wire, n, block)
            sent = memoryview(bytearray(last.end))
            with torch.no_grad():
                live = live_tensors(model, fragment)
                packed = pack(live, anchor, sent, wire=wire, proof=UNSIGNED, who="I", block_elements=block)
            inputs.append(ShardInput(rank, 1.0 + rank, sent, packed.blocks))
        *_, last = blocks_of(mean_wire, n, block)
        mean = memoryview(bytearray(last.end))
        digests = weighted_mean(inputs, mean, BlockFormat(n, block, wire, mean_wire, UNSIGNED))
        outer.step(entry, decoded(mean_wire, [mean], n, block))
    print(name, [i.digests for i in inputs], digests, outer.digest())
"""


def test_all_processors_come_to_the_same_bits() -> None:
    """Torch and numpy use different code on different processors.

    This test forbids them some instructions of this processor.
    """
    numpy = import_module("numpy._core._multiarray_umath")
    every = " ".join(name for name in numpy.__cpu_dispatch__ if numpy.__cpu_features__[name])
    tried: dict[tuple[str, str], list[str]] = {}
    for without, capabilities in (("", ["default", "avx2", "avx512"]), (every, ["avx2"])):
        env = {**environment(), "NPY_DISABLE_CPU_FEATURES": without}
        command = [sys.executable, "-c", ROUND_DIGESTS, *capabilities]
        ran = subprocess.run(command, env=env, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        lines = ran.stdout.splitlines()
        n = len(DEFAULT_MEAN_WIRE)  # each capability has its name and a line for each wire
        tried |= {(lines[at], without): lines[at + 1 : at + 1 + n] for at in range(0, len(lines), 1 + n)}
    assert tried.keys() == {("DEFAULT", ""), ("AVX2", ""), ("AVX512", ""), ("AVX2", every)}, (
        "torch uses the instructions of each case"
    )
    assert len(set(map(tuple, tried.values()))) == 1


def test_the_digest_of_a_step_is_that_of_its_result() -> None:
    for n_stepped, n in [(200_000, 300_001), (5, 5), (0, 7)]:
        anchor = torch.randn(n)
        outer = NesterovSGD(Fragment(0, (), n_stepped, n), anchor, Schedule(0.7, 0.9, 0, 1))
        outer.step(0, iter([(0, torch.randn(n // 2).numpy()), (n // 2, torch.randn(n - n // 2).numpy())]))
        while_stepping = outer.digest()
        outer._digest = None
        assert outer.digest() == while_stepping
