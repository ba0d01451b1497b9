"""Names of a model's tensors are the same with and without wrappers, and two tensors never have the same name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.training import PLAIN, next_process, nudge, place
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from diloco import DiLoCo
from diloco.errors import ContributionError
from diloco.fragments import plan_fragments
from diloco.tensor_names import by_clean_name, clean_name, find_tensor, saved_buffers
from executors.store import MemoryStore


@pytest.fixture(autouse=True)
def _processes_are_forgotten() -> None:
    next_process()


@pytest.fixture
def _alone_in_a_group(tmp_path: Path) -> Iterator[None]:
    """Make this process a group of one, which wrappers of torch.distributed ask for."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(module: nn.Module) -> nn.Module:
    whole: Any = torch.compile(module, backend="eager")
    assert isinstance(whole, nn.Module)
    return whole


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nothing": lambda module: module,
    "torch.compile": compiled,
    "torch.compile, twice": lambda module: compiled(nn.DataParallel(compiled(module))),
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "DataParallel": nn.DataParallel,
    "AveragedModel": AveragedModel,
    "checkpoint_wrapper": checkpoint_wrapper,
}


def model() -> nn.Module:
    """A model with a stack of layers, statistics, and a layer that is called `module` on purpose."""
    made = nn.ModuleDict(
        {
            "module": nn.Linear(2, 2),
            "layers": nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(3)),
            "_orig_mod": nn.Linear(2, 1),
        }
    )
    made.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    return made


NAMES = [name for name, _ in model().named_parameters()]


def wrapped(name: str) -> tuple[nn.Module, nn.Module]:
    """Return a model that is wrapped as a whole and in its layers, and the same model without wrappers."""
    plain, inner, wrap = model(), model(), WRAPPERS[name]
    inner.load_state_dict(plain.state_dict())
    layers: Any = inner.get_submodule("layers")
    layers[1] = wrap(layers[1])
    layers[2][0] = wrap(layers[2][0])
    return wrap(inner), plain


@pytest.mark.usefixtures("_alone_in_a_group")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_adds_nothing_to_the_name_of_a_tensor_at_any_depth(wrapper: str) -> None:
    whole, plain = wrapped(wrapper)
    named = by_clean_name(whole, whole.named_parameters())
    assert list(named) == NAMES
    for name, values in plain.named_parameters():
        assert torch.equal(named[name], values)
        assert find_tensor(whole, name, "parameter") is named[name]
    saved = {name: b for name, b in saved_buffers(whole).items() if "n_averaged" not in name}
    assert list(saved) == [name for name, _ in plain.named_buffers()]
    for name, buffer in saved.items():
        assert find_tensor(whole, name, "buffer") is buffer


@pytest.mark.usefixtures("_alone_in_a_group")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("fragments", [2, 3, [["module", "layers.1"], ["layers.0", "layers.2", "_orig_mod"]]])
def test_fragments_are_the_same_for_every_wrapping(wrapper: str, fragments: Any) -> None:
    whole, plain = wrapped(wrapper)
    planned = plan_fragments(whole, fragments, sync_buffers=None)
    assert planned == plan_fragments(plain, fragments, sync_buffers=None)


def test_a_list_of_fragments_may_name_a_wrapped_layer_as_torch_does() -> None:
    whole, _ = wrapped("torch.compile")
    raw = [name for name, _ in whole.named_parameters()]
    ones = ["_orig_mod.module", "_orig_mod.layers.1._orig_mod", "_orig_mod.layers.2"]
    assert all(any(name.startswith(f"{one}.") for name in raw) for one in ones)
    planned = plan_fragments(whole, [ones, ["layers.0", "_orig_mod"]], sync_buffers=None)
    assert planned == plan_fragments(
        model(), [["module", "layers.1", "layers.2"], ["layers.0", "_orig_mod"]], sync_buffers=None
    )


def test_a_name_that_torch_has_not_wrapped_stays_as_it_is() -> None:
    assert [clean_name(model(), name) for name in NAMES] == NAMES
    assert clean_name(nn.Linear(1, 1), "module.weight") == "module.weight"


class WrapperWithTheNamesOfWhatItWraps(nn.DataParallel[nn.Module]):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.weight = nn.Parameter(torch.zeros(1))


def test_two_tensors_never_have_one_name() -> None:
    for inner in (nn.Linear(2, 2), compiled(nn.Linear(2, 2)), nn.DataParallel(nn.Linear(2, 2))):
        whole = WrapperWithTheNamesOfWhatItWraps(inner)
        named = by_clean_name(whole, whole.named_parameters())
        assert len(named) == 3
        for name, parameter in named.items():
            assert find_tensor(whole, name, "parameter") is parameter


def test_a_model_that_gives_two_tensors_one_name_is_refused() -> None:
    class Names(nn.Linear):
        def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
            yield "weight", nn.Parameter(torch.ones(1))
            yield "weight", nn.Parameter(torch.zeros(1))

    with pytest.raises(ValueError, match="The model has two tensors named 'weight'"):
        plan_fragments(Names(1, 1), 1, sync_buffers=None)


def test_a_layer_that_is_compiled_or_plain_again_while_replicas_train_is_found() -> None:
    inner = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    with DiLoCo(inner, inner_steps=1, **PLAIN, **place()) as diloco:
        for layer in (compiled(inner[0]), inner[0]):
            before = diloco.anchor()
            inner[0] = layer
            nudge(inner, 1.0)
            diloco.step()
            after = diloco.anchor()
            moved = {name: round((after[name] - values).item(), 5) for name, values in before.items()}
            assert moved == {"0.weight": 1.0, "1.weight": 1.0}


def test_a_layer_that_is_gone_is_named() -> None:
    inner = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    diloco = DiLoCo(inner, inner_steps=1, **PLAIN, **place())
    nudge(inner, 1.0)
    del inner[1]
    with pytest.raises(
        ContributionError, match=r"The parameter '1\.weight' is in the run's average and no longer in th"
    ):
        diloco.step()


@pytest.mark.parametrize("switch", [(True, False), (False, True)])
def test_a_run_continues_if_a_later_attempt_compiles_and_the_earlier_did_not(switch: tuple[bool, bool]) -> None:
    store, kept = MemoryStore(), list[dict[str, Tensor]]()
    for is_compiled in switch:
        torch.manual_seed(len(kept))
        inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        inner.register_buffer("table", torch.zeros(4))
        whole = compiled(inner) if is_compiled else inner
        where = place(store)
        options: dict[str, Any] = {"snapshot_every": 1, "sync_buffers": False}
        diloco = DiLoCo(whole, inner_steps=1, **options, **PLAIN, **where)
        diloco.attach_state("optimizer", torch.optim.AdamW(whole.parameters()))
        if kept:
            for name, values in inner.state_dict().items():
                assert torch.equal(values, kept[0][name]), name
        nudge(inner, 1.0)
        inner.get_buffer("table").fill_(7.0)
        diloco.step()
        kept.append({name: values.clone() for name, values in inner.state_dict().items()})
        diloco._workers.uploads.finish()
        diloco._workers.close()  # the replica was killed, so it writes no bye
        next_process()


@pytest.mark.usefixtures("_alone_in_a_group")
@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning")
def test_a_model_in_pieces_is_refused_before_anything_is_written() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    split = nn.Sequential(nn.Linear(2, 2))
    fully_shard(split, mesh=init_device_mesh("cpu", (1,)))
    inside = nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")))
    for whole, subject in (
        (inside[0], r"The model is wrapped in FullyShardedDataParallel"),
        (inside, r"'0' of the model is wrapped in FullyShardedDataParallel"),
        (split, r"Parameter '0\.weight' is a DTensor, as fully_shard"),
    ):
        store = MemoryStore()
        with pytest.raises(TypeError, match=f"{subject}.*fully_shard in a process group"):
            DiLoCo(whole, **place(store))
        assert list(store.list("")) == []
