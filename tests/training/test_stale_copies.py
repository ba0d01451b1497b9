"""Optimizers and averages with copies of the weights: those that undo a round are found."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
import torch
from support.training import PLAIN, ScheduleFree, leave, nudge, place
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from diloco import DiLoCo
from diloco.errors import DiLoCoError, StaleCopyError
from diloco.fragments import plan_fragments
from diloco.outer import open_diloco
from diloco.stale_copies.comparison import MOST_SEARCHES, STRIKES, StaleCopies
from diloco.stale_copies.optimizer_hook import _watchers, unwatch, watch
from diloco.stale_copies.search import MOST_OBJECTS, names_of, reachable_objects
from diloco.testing import run_replicas
from executors.store import MemoryStore


class MasterWeights:
    """Steps float32 copies of the weights and writes them into the model, like apex and Megatron."""

    def __init__(self, model: nn.Module, lr: float = 0.01) -> None:
        self.parameters = list(model.parameters())
        self.copies = [p.detach().clone().float() for p in self.parameters]
        self.inner = torch.optim.AdamW(self.copies, lr)

    @torch.no_grad()
    def step(self) -> None:
        for master, parameter in zip(self.copies, self.parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.step()
        for master, parameter in zip(self.copies, self.parameters, strict=True):
            parameter.copy_(master)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def copy_model_to_master(self) -> None:
        for master, parameter in zip(self.copies, self.parameters, strict=True):
            master.copy_(parameter)


class OwnSgd:
    """An optimizer that is not one of torch, with a copy of the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.pairs = [(p, p.detach().clone()) for p in model.parameters()]

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in self.pairs:
            if parameter.grad is not None:
                master -= 0.01 * parameter.grad
            parameter.copy_(master)

    def zero_grad(self) -> None:
        for parameter, _ in self.pairs:
            parameter.grad = None


class HiddenSgd(OwnSgd):
    """The same with copies in numpy, where no search finds them."""

    def __init__(self, model: nn.Module) -> None:
        self.hidden = [(p, p.detach().numpy().copy()) for p in model.parameters()]

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in self.hidden:
            if parameter.grad is not None:
                master -= 0.01 * parameter.grad.numpy()
            parameter.copy_(torch.from_numpy(master))

    def zero_grad(self) -> None:
        for parameter, _ in self.hidden:
            parameter.grad = None


class InState(torch.optim.SGD):
    """An optimizer of torch that keeps its masters in its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                master = self.state[p].setdefault("master", p.detach().clone())
                master -= 0.01 * p.grad
                p.copy_(master)


class Gathering(MasterWeights):
    """Accumulates gradients for three steps before it steps its masters."""

    n_calls = 0

    def step(self) -> None:
        self.n_calls += 1
        if self.n_calls % 3 == 0:
            super().step()
            self.zero_grad(now=True)

    def zero_grad(self, *, now: bool = False) -> None:
        if now:
            super().zero_grad()


class Early(MasterWeights):
    """Writes its masters into the model before each forward pass, as sharded optimizers gather them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        model.register_forward_pre_hook(lambda *_: self.gather())

    @torch.no_grad()
    def gather(self) -> None:
        for master, parameter in zip(self.copies, self.parameters, strict=True):
            parameter.copy_(master)

    @torch.no_grad()
    def step(self) -> None:
        for master, parameter in zip(self.copies, self.parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.step()


class SlowWeights:
    """Lookahead (Zhang et al., arXiv 1907.08610): after every `k` steps, the parameters go back to `share` of
    the way that they have made in these steps.
    """

    def __init__(self, model: nn.Module, k: int, share: float, *, hidden: bool) -> None:
        self.inner = torch.optim.AdamW(model.parameters(), 0.01)
        slow = [p.detach().clone().numpy() if hidden else p.detach().clone() for p in model.parameters()]
        n_steps = 0

        @torch.no_grad()
        def step() -> None:
            nonlocal n_steps
            self.inner.step()
            n_steps += 1
            if n_steps % k == 0:
                for parameter, each in zip(model.parameters(), map(torch.as_tensor, slow), strict=True):
                    each.lerp_(parameter, share)
                    parameter.copy_(each)

        self.step, self.zero_grad = step, self.inner.zero_grad


class Fused:
    """Steps each parameter, or a master of it, in the backward pass as soon as its gradient exists."""

    def __init__(self, model: nn.Module, *, masters: bool = False) -> None:
        for parameter in model.parameters():
            stepped = parameter.detach().clone() if masters else parameter
            optimizer = torch.optim.SGD([stepped], 0.05)
            hook: Any = parameter.register_post_accumulate_grad_hook
            hook(partial(self._step, optimizer, stepped))

    @staticmethod
    @torch.no_grad()
    def _step(optimizer: torch.optim.Optimizer, stepped: Tensor, parameter: Tensor) -> None:
        stepped.grad = parameter.grad
        optimizer.step()
        if stepped is not parameter:
            parameter.copy_(stepped)
        parameter.grad = None

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


def mlp(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model whose weights depend on the seed alone, because replicas are threads and share torch's
    generator.
    """
    draw = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.25, 0.25, generator=draw)
    return model


def train(
    model: nn.Module,
    optimizer: Any,
    diloco: DiLoCo,
    steps: int,
    rank: int = 0,
    after: Callable[[Any], None] = lambda report: None,
) -> None:
    """Make steps on this rank's own data."""
    draw = torch.Generator().manual_seed(rank)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        x = torch.randn(32, 16, generator=draw)
        loss = (model(x.to(dtype)).float().squeeze(1) - x.sum(1).tanh()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after(diloco.step())


def error_of(make: Callable[[nn.Module], Any], inner_steps: int, **options: Any) -> list[str]:
    """Return the errors of two replicas that train with an optimizer."""

    def body(where: Mapping[str, Any]) -> str:
        model = mlp()
        diloco = DiLoCo(model, inner_steps=inner_steps, **{**PLAIN, **options}, **where)
        try:
            train(model, make(model), diloco, 6 * inner_steps, where["rank"])
        except StaleCopyError as error:
            return str(error)
        finally:
            leave(diloco)
        return ""

    return run_replicas(2, body)


@pytest.mark.parametrize("inner_steps", [1, 2, 10])
@pytest.mark.parametrize("options", [{}, {"outer_lr": 0.7, "outer_momentum": 0.9}, {"background": True}], ids=str)
def test_an_optimizer_with_master_weights_is_named_with_the_parameter_and_the_remedy(
    inner_steps: int, options: dict[str, Any]
) -> None:
    for error in error_of(MasterWeights, inner_steps, **options):
        assert error.startswith("Optimizer MasterWeights (around AdamW) put '"), error
        assert any(f"before round {n}:" in error for n in (1, 2, 3)), error
        assert "copy the model's parameters into that copy" in error


@pytest.mark.filterwarnings("ignore:.*keeps a copy of:UserWarning")
@pytest.mark.parametrize(("kind", "name"), [(lambda m: InState(m.parameters(), 0.01), "InState"), (OwnSgd, "The opt")])
def test_masters_in_the_state_or_in_an_optimizer_that_is_none_of_torch_are_found(kind: Any, name: str) -> None:
    for error in error_of(kind, 10):
        assert name in error


def test_rounds_that_a_hidden_copy_undoes_cause_a_warning_with_both_possible_reasons() -> None:
    """Without a copy that is found, gradients that lead straight back look the same. So this is not an error."""

    def body(where: Mapping[str, Any]) -> str:
        model = mlp()
        diloco = DiLoCo(model, inner_steps=10, **PLAIN, **where)
        try:
            train(model, HiddenSgd(model), diloco, 60, where["rank"])
        except UserWarning as warning:  # the settings of the tests turn warnings into errors
            return str(warning)
        finally:
            leave(diloco)
        return ""

    found = [text for text in run_replicas(2, body) if text]
    assert found
    for text in found:
        assert text.startswith("The first step after each of 3 rounds up to ")
        assert "keeps a copy of the weights" in text
        assert "compare the losses of all ranks" in text


@pytest.mark.parametrize("inner_steps", [1, 2])
def test_gradients_that_lead_straight_back_without_an_optimizer_of_torch_are_no_proof_of_a_copy(
    inner_steps: int,
) -> None:
    """Each replica is back at its own minimum after every step, as if it had a copy of its weights."""

    def body(where: Mapping[str, Any]) -> list[str]:
        model = nn.ParameterList([torch.zeros(64), torch.zeros(64)])
        diloco = DiLoCo(model, inner_steps=inner_steps, **PLAIN, **where)
        target, found = 1.0 + where["rank"], []
        for _ in range(8 * inner_steps):
            with torch.no_grad():
                for parameter in model:
                    parameter.sub_(parameter - target)
            try:
                diloco.step()
            except UserWarning as warning:  # the settings of the tests turn warnings into errors
                found.append(str(warning))
                diloco.step()
        assert float(diloco.anchor()["0"].mean()) == pytest.approx(1.5)
        leave(diloco)
        return found

    for found in run_replicas(2, body):
        assert len(found) == 1, "the replica warns once"
        assert "keeps a copy of the weights" in found[0]


def test_masters_that_gather_gradients_for_several_steps_are_found_although_the_first_step_changes_nothing() -> None:
    for error in error_of(Gathering, 8):
        assert error.startswith("The optimizer put '"), error


def test_masters_that_are_written_before_the_forward_pass_are_found_although_a_moved_value_stays() -> None:
    for error in error_of(Early, 8):
        assert error.startswith("Optimizer Early (around AdamW) put '"), error


def test_masters_that_are_stepped_in_the_backward_pass_are_found() -> None:
    # the replica that gets the error first ends the run of the other
    errors = error_of(partial(Fused, masters=True), 8)
    assert any(error.startswith("Optimizer SGD put '") for error in errors), errors


@pytest.mark.parametrize("hidden", [False, True], ids=["in tensors", "in numpy"])
@pytest.mark.parametrize(("k", "share"), [(2, 0.5), (5, 0.5)])
def test_slow_weights_that_take_back_rounds_some_steps_later_are_warned_of(k: int, share: float, hidden: bool) -> None:
    def body(where: Mapping[str, Any]) -> str:
        model = mlp()
        diloco = DiLoCo(model, inner_steps=8, **PLAIN, **where)
        optimizer = SlowWeights(model, k, share, hidden=hidden)
        try:
            train(model, optimizer, diloco, 72, where["rank"])
        except UserWarning as warning:  # the settings of the tests turn warnings into errors
            return str(warning)
        finally:
            leave(diloco)
        return ""

    warnings = [warning for warning in run_replicas(2, body) if warning]
    assert warnings
    for warning in warnings:
        assert warning.startswith("Single steps undid "), warning
        assert "diloco.average_also()" in warning


def test_masters_in_bfloat16_training_are_found() -> None:
    def body(where: Mapping[str, Any]) -> bool:
        model = mlp(dtype=torch.bfloat16)
        diloco = DiLoCo(model, inner_steps=10, **PLAIN, **where)
        with pytest.raises(StaleCopyError):
            train(model, MasterWeights(model), diloco, 60, where["rank"])
        leave(diloco)
        return True

    assert run_replicas(2, body) == [True, True]


def test_masters_that_take_the_models_values_after_each_round_train_as_one_model() -> None:
    def body(where: Mapping[str, Any]) -> list[Tensor]:
        model = mlp()
        with DiLoCo(model, inner_steps=5, total_steps=30, **PLAIN, **where) as diloco:
            optimizer = MasterWeights(model)

            def take(report: Any) -> None:
                if report is not None:
                    optimizer.copy_model_to_master()

            train(model, optimizer, diloco, 30, where["rank"], take)
        return [p.detach().clone() for p in model.parameters()]

    first, second = run_replicas(2, body)
    assert all(map(torch.equal, first, second))


HONEST: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "a large momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.95, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "a large step": lambda p: torch.optim.AdamW(p, 0.3),
    "decay": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=1.0),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
}


@pytest.mark.parametrize("inner_steps", [1, 3])
@pytest.mark.parametrize("kind", HONEST)
def test_an_honest_optimizer_is_never_taken_for_one_with_a_copy(kind: str, inner_steps: int) -> None:
    make = HONEST[kind]
    options = {"outer_lr": 0.7, "outer_momentum": 0.9}
    assert error_of(lambda model: make(list(model.parameters())), inner_steps, **options) == ["", ""]


@pytest.mark.parametrize("inner_steps", [1, 2])
def test_a_loss_that_one_step_minimizes_undoes_each_merge_and_is_not_a_copy(inner_steps: int) -> None:
    """Each replica is back at its own minimum after every step. From outside, this looks like an undone round."""

    def body(where: Mapping[str, Any]) -> tuple[float, bool]:
        model = nn.Linear(64, 1, bias=False)
        target = torch.full((1, 64), 1.0 + where["rank"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        diloco = DiLoCo(model, inner_steps=inner_steps, **PLAIN, **where)
        for _ in range((MOST_SEARCHES + 2) * inner_steps):
            torch.autograd.backward((model.weight - target).square().sum())
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()
        value = float(diloco.anchor()["weight"].mean())
        is_trusted = diloco._stale_copies.is_trusted
        leave(diloco)
        return value, is_trusted

    for value, is_trusted in run_replicas(2, body):
        assert value == pytest.approx(1.5)
        assert is_trusted  # so no later step is compared


@pytest.mark.parametrize("inner_steps", [1, 2])
@pytest.mark.parametrize("kind", ["closure", "lbfgs", "fused"])
def test_an_honest_optimizer_that_computes_gradients_in_its_step_or_steps_in_their_pass_is_tested_at_the_same_gradients(
    kind: str, inner_steps: int
) -> None:
    """With a loss that one step minimizes, a value that was moved before the gradient would be back after the step."""

    def body(where: Mapping[str, Any]) -> float:
        model = nn.Sequential(nn.Linear(64, 1, bias=False), nn.Linear(1, 64, bias=False))
        targets = [torch.full_like(p, 1.0 + where["rank"]) for p in model.parameters()]
        diloco = DiLoCo(model, inner_steps=inner_steps, **PLAIN, **where)
        fused = [torch.optim.SGD([p], 0.5) for p in model.parameters()] if kind == "fused" else []
        for optimizer, parameter in zip(fused, model.parameters(), strict=False):
            hook: Any = parameter.register_post_accumulate_grad_hook
            hook(lambda _, optimizer=optimizer: optimizer.step())
        whole: Any = torch.optim.LBFGS if kind == "lbfgs" else torch.optim.SGD
        optimizer = whole(model.parameters(), lr=0.5)

        def closure() -> Any:
            model.zero_grad()
            model(torch.ones(1, 64))  # a backward pass would refuse changed weights
            loss = sum((p - t).square().sum() for p, t in zip(model.parameters(), targets, strict=True))
            torch.autograd.backward(loss + 0 * model(torch.ones(1, 64)).sum())
            return loss

        for _ in range(8 * inner_steps):
            closure() if fused else optimizer.step(closure)
            if diloco.step() is not None and kind == "lbfgs":
                optimizer.state.clear()  # a history from before the round causes a warning
        value = float(diloco.anchor()["0.weight"].mean())
        leave(diloco)
        return value

    assert run_replicas(2, body) == [pytest.approx(1.5), pytest.approx(1.5)]


class Deep(torch.autograd.Function):
    """Calls a function in a backward pass that torch runs in another thread, as it runs every pass on a GPU.

    On the CPU, torch takes another thread for a backward pass within 60 others.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, act: Callable[[], object]) -> Tensor:
        ctx.depth, ctx.act = depth, act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            if ctx.depth:
                backward_within(ctx.act, ctx.depth - 1)
            else:
                ctx.act()
        return gradient, None, None


def backward_within(act: Callable[[], object], depth: int) -> None:
    apply: Any = Deep.apply
    torch.autograd.backward(apply(torch.ones((), requires_grad=True), depth, act))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_an_optimizer_that_steps_in_a_backward_pass_on_a_gpu_is_known() -> None:
    optimizers_that_step_in_their_pass_are_known("cuda", lambda act: act())


WITHIN_OTHER_PASSES = """
from training import test_stale_copies as here

here.optimizers_that_step_in_their_pass_are_known("cpu", lambda act: here.backward_within(act, 70))
"""


def test_an_optimizer_that_steps_in_a_backward_pass_of_another_thread_is_known() -> None:
    # After such a pass, no child of this process can compute gradients, and other tests fork.
    ended = subprocess.run([sys.executable, "-c", WITHIN_OTHER_PASSES], cwd=Path(__file__).parents[1], check=False)
    assert ended.returncode == 0


def test_a_thread_that_ends_watching_leaves_nothing_to_a_later_thread_of_the_same_number() -> None:
    def callback(_: torch.optim.Optimizer) -> None: ...

    before = _watchers.get(get_ident())
    watch(callback)
    unwatch(callback)
    assert _watchers.get(get_ident()) == before != ()


def optimizers_that_step_in_their_pass_are_known(device: str, around: Callable[[Callable[[], object]], object]) -> None:
    model = nn.Sequential(nn.Linear(8, 1, bias=False), nn.Linear(1, 8, bias=False)).to(device)
    threads: set[int] = set()
    fused = [torch.optim.SGD([p], 0.01) for p in model.parameters()]
    for optimizer, parameter in zip(fused, model.parameters(), strict=True):

        def step(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            threads.add(get_ident())
            optimizer.step()

        hook: Any = parameter.register_post_accumulate_grad_hook
        hook(step)
    diloco = open_diloco(model, inner_steps=2, **PLAIN, **place(MemoryStore()))
    around(lambda: torch.autograd.backward(model(torch.ones(1, 8, device=device)).sum()))
    diloco.step()
    owners = [owner() for owner in diloco._stale_copies._owners]
    leave(diloco)
    assert get_ident() not in threads
    assert {*map(id, owners)} == {*map(id, fused)}


def test_a_wrapper_is_named_even_if_variables_lead_to_more_objects_than_are_looked_at() -> None:
    class Wrapper:
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner

        def step(self) -> None: ...

    data = [[object()] for _ in range(2 * MOST_OBJECTS)]
    wrapper = Wrapper(torch.optim.SGD([torch.zeros(1)]))
    assert names_of([wrapper.inner]) == "optimizer Wrapper (around SGD)"
    assert len(list(reachable_objects())) <= MOST_OBJECTS
    assert len(data) > MOST_OBJECTS


def test_a_search_in_a_test_does_not_go_through_all_tests_of_the_session(request: pytest.FixtureRequest) -> None:
    """A fixture refers to the session, which refers to 5,000 tests. That is more than the search may visit."""
    assert not [thing for thing in reachable_objects() if thing is request.session or thing is request.config]


def test_the_test_of_a_suspicion_leaves_parameters_as_they_were_but_for_rounding() -> None:
    model, other = nn.Linear(64, 64), nn.Linear(64, 64)
    other.load_state_dict(model.state_dict())
    stale = StaleCopies(model, plan_fragments(model, 1, sync_buffers=None))
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, other)]

    def step(gradient: float) -> None:
        for each, optimizer in zip((model, other), optimizers, strict=True):
            for parameter in each.parameters():
                parameter.grad = torch.full_like(parameter, gradient)
            optimizer.step()
        stale.check()

    for number in range(STRIKES):
        stale.before_merge()
        nudge(model, 0.5)
        nudge(other, 0.5)
        stale.after_merge(f"round {number + 1}")
        step(5.0)
    assert stale._test is not None
    step(1.0)
    assert stale._n_cleared == 1
    for parameter, untouched in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, untouched)


def test_a_step_of_another_models_optimizer_with_layers_of_the_same_shape_moves_no_value() -> None:
    """For example, a discriminator makes a step between a generator's forward and backward pass.

    If the search moved a value of the generator there, autograd would refuse the gradient.
    """
    generator, discriminator = nn.Linear(64, 64), nn.Linear(64, 64)
    stale = StaleCopies(generator, plan_fragments(generator, 1, sync_buffers=None))
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (discriminator, generator)]
    for optimizer in optimizers:
        optimizer.step()
    stale.check()
    for number in range(STRIKES):
        assert stale._test is None, "one step that undoes a round is not a suspicion"
        stale.before_merge()
        nudge(generator, 0.5)
        stale.after_merge(f"round {number + 1}")
        nudge(generator, -0.5)
        stale.check()
    assert stale._test is not None, "several such steps in a row cause a test in the next step"
    loss = generator(generator(torch.ones(1, 64))).sum()
    optimizers[0].step()
    loss.backward()
    optimizers[1].step()
    assert stale._test.optimizers == [optimizers[1]]
    stale.close()


def test_a_step_of_one_of_two_optimizers_moves_no_value_that_the_other_steps() -> None:
    """In a GAN with one DiLoCo for both networks, the generator's values are still needed for gradients."""
    gan = nn.ModuleDict({"generator": nn.Linear(64, 64), "discriminator": nn.Linear(64, 64)})
    stale = StaleCopies(gan, plan_fragments(gan, 1, sync_buffers=None))
    optimizers = [torch.optim.SGD(gan[name].parameters(), 0.1) for name in ("discriminator", "generator")]
    for optimizer in optimizers:
        optimizer.step()
    stale.check()
    for number in range(STRIKES):
        stale.before_merge()
        nudge(gan, 0.5)
        stale.after_merge(f"round {number + 1}")
        nudge(gan, -0.5)
        stale.check()
    assert stale._test is not None
    before = {name: values.clone() for name, values in gan.state_dict().items()}
    made = gan["generator"](gan["generator"](torch.ones(1, 64)))
    optimizers[0].step()
    loss = gan["discriminator"](made).sum()
    loss.backward()
    optimizers[1].step()
    assert stale._test.optimizers == optimizers
    gan.zero_grad()
    stale.check()
    assert stale._n_cleared == 1
    for name, values in gan.named_parameters():
        if name.startswith("discriminator"):  # this parameter had no gradient at the step
            torch.testing.assert_close(values.detach(), before[name])
    stale.close()


def test_parameters_in_any_layout_are_compared_and_kept() -> None:
    model = nn.Conv2d(4, 8, 3)
    model.weight = nn.Parameter(model.weight.detach().to(memory_format=torch.channels_last))
    target = torch.ones_like(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    diloco = DiLoCo(model, inner_steps=1, outer_lr=0.5, outer_momentum=0.5, momentum_warmup=0, **place())
    for _ in range(8):
        torch.autograd.backward((model.weight - target).square().sum())
        optimizer.step()
        optimizer.zero_grad()
        diloco.step()
    leave(diloco)


# -- averages of weights -----------------------------------------------------------------------------------------------


def test_an_ema_of_a_module_is_one_and_the_same_on_every_replica() -> None:
    def body(where: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor], int]:
        model = mlp(where["rank"])
        with DiLoCo(model, inner_steps=5, total_steps=20, **PLAIN, **where) as diloco:
            average: Any = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
            ema = AveragedModel(model, multi_avg_fn=average)
            diloco.average_also(ema)
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
            train(model, optimizer, diloco, 20, where["rank"], lambda report: ema.update_parameters(model))
        return [p.detach() for p in model.parameters()], [p.detach() for p in ema.parameters()], int(ema.n_averaged)

    (model, ema, n), (other, other_ema, _) = run_replicas(2, body)
    assert all(map(torch.equal, model, other))
    assert all(map(torch.equal, ema, other_ema))
    assert n == 20
    assert not any(map(torch.equal, model, ema))


def test_an_average_made_before_the_diloco_is_warned_of_and_takes_the_anchor_when_it_is_averaged_too() -> None:
    def body(where: Mapping[str, Any]) -> tuple[str, float, float]:
        model = mlp(where["rank"])
        early, averaged = copy.deepcopy(model), copy.deepcopy(model)
        best = copy.deepcopy(model.state_dict())  # scripts keep such a copy of their best model
        diloco = DiLoCo(model, inner_steps=5, **PLAIN, **where)
        diloco.average_also(averaged)
        weight = diloco.anchor()["0.weight"]
        away = float((averaged.state_dict()["0.weight"] - weight).abs().max())
        try:
            diloco.step()
        except UserWarning as warning:  # the settings of the tests turn warnings into errors
            return str(warning), away, float(best["0.weight"].mean())
        finally:
            leave(diloco)
        return "", away, float(early.state_dict()["0.weight"].mean())

    told = run_replicas(2, body)
    assert [away for _, away, _ in told] == [0.0, 0.0]
    first, second = sorted(message for message, _, _ in told)
    assert first == ""  # this replica's values became the first anchor
    assert "and 2 more as it was before the first anchor, like an EMA made too early" in second
    assert "diloco.average_also()" in second


def test_tensors_that_an_optimizer_replaces_are_found_again_in_each_round() -> None:
    def body(where: Mapping[str, Any]) -> Tensor:
        model, held = nn.Linear(1, 1), {"slow": torch.full((4,), float(where["rank"]))}
        diloco = DiLoCo(model, inner_steps=2, total_steps=4, **PLAIN, **where)
        diloco.average_also(lambda: held)
        start = held["slow"].clone()
        for _ in range(4):
            held["slow"] = held["slow"] + 1.0 + where["rank"]
            diloco.step()
        diloco.close()
        return held["slow"] - start

    first, second = run_replicas(2, body)
    assert torch.equal(first, second)
    assert first.tolist() == [6.0] * 4  # 4 steps of 1.5 on average


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (3, "takes a module, a mapping from names to tensors"),
        ({"a": 1}, "takes tensors, got"),
        ({"a": torch.arange(3)}, "has none"),
        (nn.Identity(), "has none"),
    ],
)
def test_tensors_that_cannot_be_averaged_are_refused_by_name(thing: Any, words: str) -> None:
    diloco = DiLoCo(nn.Linear(1, 1), inner_steps=2, **place())
    with pytest.raises((TypeError, ValueError), match=words):
        diloco.average_also(thing)
    leave(diloco)


def test_tensors_averaged_outside_the_model_cost_no_comparison_in_steps_or_rounds() -> None:
    diloco = DiLoCo(nn.Linear(1, 1), inner_steps=2, **place())
    before = len(_watchers[get_ident()])
    diloco.average_also(nn.Linear(1, 1))
    (other,) = [other for other, _ in diloco._extra]
    assert other._stale_copies.is_trusted
    assert len(_watchers[get_ident()]) == before
    leave(other)
    leave(diloco)


def test_average_also_after_the_first_step_is_refused() -> None:
    diloco = DiLoCo(nn.Linear(1, 1), inner_steps=2, **place())
    diloco.step()
    with pytest.raises(DiLoCoError, match="before the first step"):
        diloco.average_also(nn.Linear(1, 1))
    leave(diloco)


# -- copies in an optimizer's state ------------------------------------------------------------------------------------


def test_an_optimizer_that_keeps_weights_in_its_state_is_warned_of_in_its_first_step() -> None:
    model = mlp()
    optimizer = ScheduleFree(model.parameters(), 0.05)
    diloco = DiLoCo(model, inner_steps=5, **PLAIN, **place())
    with pytest.warns(UserWarning, match=r"ScheduleFree keeps a copy of '0.weight' in its state \('z'\)"):
        train(model, optimizer, diloco, 1)
    leave(diloco)


class Wrapped:
    """An optimizer around another one, as Lookahead often is: torch calls no hooks of its step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups
        self.state = {p: {"slow": [p.detach() + 0.001]} for group in self.param_groups for p in group["params"]}

    def step(self) -> None:
        self.inner.step()

    def zero_grad(self) -> None:
        self.inner.zero_grad()


def test_weights_in_lists_in_the_state_of_an_optimizer_around_another_are_warned_of_in_the_first_step() -> None:
    model = mlp()
    optimizer = Wrapped(torch.optim.SGD(model.parameters(), 0.05))
    diloco = DiLoCo(model, inner_steps=5, **PLAIN, **place())
    with pytest.warns(UserWarning, match=r"Wrapped keeps a copy of '0.weight' in its state \('slow'\)"):
        train(model, optimizer, diloco, 1)
    leave(diloco)


def test_an_optimizer_that_is_attached_with_copies_in_its_state_is_warned_of_at_once() -> None:
    model = mlp()
    optimizer = ScheduleFree(model.parameters(), 0.05)
    for p in model.parameters():
        optimizer.state[p]["z"] = p.detach().clone()
    diloco = DiLoCo(model, inner_steps=5, **PLAIN, **place())
    with pytest.warns(UserWarning, match="average_also"):
        diloco.attach_state("optimizer", optimizer)
    leave(diloco)


def test_a_schedule_free_optimizer_whose_z_is_averaged_too_ends_with_one_model_better_than_alone() -> None:
    def held_out(model: nn.Module) -> float:
        x = torch.randn(4096, 16, generator=torch.Generator().manual_seed(99))
        with torch.no_grad():
            return float((model(x).squeeze(1) - x.sum(1).tanh()).square().mean())

    def body(where: Mapping[str, Any]) -> tuple[list[Tensor], float]:
        model = mlp()
        optimizer = ScheduleFree(model.parameters(), 0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            diloco = DiLoCo(model, inner_steps=10, total_steps=300, **PLAIN, **where)
            for p in model.parameters():
                optimizer.state[p]["z"] = p.detach().clone()
            diloco.average_also(lambda: {name: optimizer.state[p]["z"] for name, p in model.named_parameters()})
            train(model, optimizer, diloco, 300, where["rank"])
            diloco.close()
        optimizer.eval()
        return [p.detach().clone() for p in model.parameters()], held_out(model)

    ((first, loss), (second, _)) = run_replicas(2, body)
    assert all(map(torch.equal, first, second))
    alone = body(place(MemoryStore()))[1]
    assert loss < alone


def test_parameters_of_a_compiled_model_are_compared_too() -> None:
    def body(where: Mapping[str, Any]) -> str:
        model = mlp()
        compiled: Any = torch.compile(model, backend="eager")
        diloco = DiLoCo(compiled, inner_steps=5, **PLAIN, **where)
        try:
            train(model, MasterWeights(model), diloco, 40, where["rank"])
        except StaleCopyError as error:
            return str(error)
        finally:
            leave(diloco)
        return ""

    assert all("_orig_mod" not in error and "put '" in error for error in run_replicas(2, body))


class ModelEmaV3(nn.Module):
    """An average of the weights, as timm names and keeps it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)


class EmaShadow:
    """An average of the weights in a list, as torch_ema and diffusers keep it."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow_params = [parameter.detach().clone() for parameter in model.parameters()]


class SchemaOfBestModel(ModelEmaV3):
    """This class is not an average: its name only contains the letters."""


@pytest.mark.parametrize("kind", [ModelEmaV3, EmaShadow, AveragedModel, SchemaOfBestModel])
@pytest.mark.parametrize("is_given", [False, True])
def test_an_average_of_one_replicas_weights_is_named_at_the_first_step_unless_it_is_averaged(
    kind: Any, is_given: bool
) -> None:
    def body(where: Mapping[str, Any]) -> str:
        torch.manual_seed(0)  # pretrained weights are the same on each replica, so their values prove nothing
        model = nn.Linear(8, 4)
        diloco = DiLoCo(model, inner_steps=2, total_steps=4, **PLAIN, **where)
        holder = {"callbacks": [kind(model)]}
        if is_given:
            (average,) = holder["callbacks"]
            diloco.average_also(
                average
                if isinstance(average, nn.Module)
                else lambda: {str(n): each for n, each in enumerate(average.shadow_params)}
            )
        try:
            diloco.step()
        except UserWarning as warning:  # the settings of the tests turn warnings into errors
            return str(warning)
        finally:
            leave(diloco)
        return ""

    for said in run_replicas(2, body):
        is_named = not is_given and kind is not SchemaOfBestModel
        assert said.startswith(f"{kind.__name__} averages the weights of this replica alone") == is_named
