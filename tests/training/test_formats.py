"""Code that knows only ADRs 0034 and 0037 can read all records of a run and compute each anchor again."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import decoder
from torch import nn

from diloco.outer import open_diloco
from diloco.rendezvous.round import Limits
from diloco.testing import run_replicas
from executors.store.file import FileStore

SHARDED = Limits(small_bytes=0, block_elements=600)
RUNS: dict[str, dict[str, Any]] = {
    "fp32": {"limits": SHARDED},
    "bf16": {"wire": "bf16", "limits": SHARDED, "outer_momentum": 0.0},
    "int8, means int8": {"wire": "int8", "limits": SHARDED},
    "int4, means int8": {"wire": "int4", "limits": SHARDED, "fragments": 2},
    "int8, means fp32": {"wire": "int8", "mean_wire": "fp32", "limits": SHARDED},
    "int8 in the seal": {"wire": "int8", "fragments": 2, "total_steps": 12},
    "int4 in the seal": {"wire": "int4", "mean_wire": "int4", "limits": Limits(block_elements=600)},
    "top8, means int4": {"wire": "top8", "limits": SHARDED, "fragments": 2},
    "top8 in the seal": {"wire": "top8", "mean_wire": "fp32", "total_steps": 12},
    "top8, each": {"wire": "top8", "mean_wire": "each", "limits": SHARDED, "fragments": 2},
    "int8, each, clip": {"wire": "int8", "mean_wire": "each", "robust": "clip", "uneven": 20.0},
    "clip, int8": {"wire": "int8", "limits": SHARDED, "robust": "clip", "uneven": 20.0},
    "clip, top8 in the seal": {"wire": "top8", "robust": "clip", "uneven": 20.0},
    "signed": {"wire": "int8", "key": b"the key of a run", "limits": SHARDED},
    "signed, in the seal": {"key": b"the key of a run"},
}


class Keeping(FileStore):
    """A store that deletes nothing."""

    def delete(self, key: str) -> None:
        pass


def model_of(rank: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(37, 31), nn.BatchNorm1d(31), nn.Linear(31, 29))
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    return model


def train(options: Mapping[str, Any], where: Mapping[str, Any]) -> dict[int, bytes]:
    """Return the anchor after this number of rounds."""
    model = model_of(where["rank"])
    rng = np.random.default_rng(where["rank"])
    buffers = dict(model.named_buffers())
    found = {}
    options = dict(options)
    uneven = options.pop("uneven", 1.0)
    scale = 0.1 * (uneven if where["rank"] == 1 else 1.0)
    with open_diloco(model, weight=1.0 + where["rank"], **options, **where) as diloco:
        diloco.attach_state("generator", torch.Generator())
        for _ in range(12):
            with torch.no_grad():
                for tensor in (*model.parameters(), buffers["1.running_mean"]):
                    tensor.add_(torch.from_numpy(scale * rng.normal(size=tensor.shape).astype(np.float32)))
            if diloco.step() is not None:
                anchor = diloco.anchor()
                found[diloco.rounds] = b"".join(anchor[name].numpy().tobytes() for name in sorted(anchor))
    return found


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.filterwarnings("ignore:.* in no average", "ignore:Each replica keeps its own float")
def test_every_object_of_a_run_is_read_and_every_mean_and_anchor_computed_again(name: str, tmp_path: Path) -> None:
    options = {"inner_steps": 2, "momentum_warmup": 3, "snapshot_every": 2, **RUNS[name]}
    anchors = run_replicas(3, lambda where: train(options, where), store=Keeping(tmp_path))
    root = tmp_path / "test" / "diloco" / "main"
    objects = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    limits = options.get("limits", Limits())
    proof = decoder.Proof(options.get("key"), "test/diloco/main/")
    run = decoder.Run(objects, limits.block_elements, proof)
    found = {}
    for entry in run:
        values = {name: part for fragment in range(len(run.names)) for name, part in run.anchor(fragment).items()}
        found[entry + 1] = b"".join(values[name].tobytes() for name in sorted(values))
    assert len(found) >= 6
    for of_replica in anchors:
        assert max(of_replica) == max(found)
        assert {rounds: found[rounds] for rounds in of_replica} == of_replica
    records = {key for key in objects if key.startswith("own/")}
    assert records
    for key in records:
        if key.endswith("/record"):
            record = decoder.frame(objects[key], key, proof).head
            tensors = objects[key.replace("/record", "/tensors.safetensors")]
            assert proof.digest(tensors) == record["digest"]
            assert all(name.startswith(("progress/", "attached/", "buffers/")) for name in decoder.safetensors(tensors))
    kept = {entry: run.rest(entry).keys() for entry in run.rests}
    assert "1.num_batches_tracked" in kept[0]
    assert all("1.running_mean" in names for entry, names in kept.items() if entry)
    others = {key for key in objects.keys() - run.read - records if not key.startswith(("bye/", "offer/"))}
    assert all(key.startswith("part/0/") for key in others), (
        "the decoder reads every object but the first states that were not chosen"
    )


def test_states_and_snapshots_of_an_outer_optimizer_of_the_users_are_read_by_the_adr(tmp_path: Path) -> None:
    options = {
        "inner_steps": 2,
        "total_steps": 12,
        "snapshot_every": 2,
        "fragments": 2,
        "outer_optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    }
    run_replicas(2, lambda where: train(options, where), store=Keeping(tmp_path))
    root = tmp_path / "test" / "diloco" / "main"
    contract = decoder.frame((root / "snapshot/0").read_bytes(), "", decoder.UNSIGNED).head["contract"]
    n_with_state = 0
    for pointer in (root / "snapshot").iterdir():
        head = decoder.frame(pointer.read_bytes(), "", decoder.UNSIGNED).head
        parts = [root / "part" / pointer.name / head["nonce"] / str(index) for index in range(len(head["parts"]))]
        tensors = {name: values for part in parts for name, values in decoder.safetensors(part.read_bytes()).items()}
        n_with_state += "outer/0/json" in tensors
        for fragment, state in enumerate(head["state"]):
            names = [name for name, (_, _, index) in contract["tensors"].items() if index == fragment]
            anchor = np.concatenate([tensors[f"anchor/{name}"].reshape(-1) for name in names])
            assert decoder.state_of_given(anchor, tensors, fragment) == state
    assert n_with_state >= 2


def test_the_decoder_knows_nothing_of_this_project() -> None:
    tree = ast.parse(Path(decoder.__file__).read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= {*sys.stdlib_module_names, "numpy", "xxhash", "blake3"}
