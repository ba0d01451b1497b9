"""Runs of fp32 without overlap give the same bits as before other wires existed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from xxhash import xxh3_128

from diloco.outer import open_diloco
from diloco.rendezvous.round import Limits
from diloco.testing import run_replicas

SHARDED = Limits(small_bytes=0, block_elements=250)
DIGESTS: dict[str, tuple[dict[str, Any], str]] = {
    "in the seal": ({}, "5bbecba1118746c5e8d82bd3c8ebbb15"),
    "in shards": ({"limits": SHARDED}, "5bbecba1118746c5e8d82bd3c8ebbb15"),
    "fragments, mixed": ({"fragments": 2, "mix": 0.25}, "1c1a8a22f123f0f082454c248c1e7f3c"),
    "bf16 model": ({"dtype": torch.bfloat16, "limits": SHARDED}, "d5dc27ed4a9bbb915bea989da5b04b4e"),
}


@pytest.mark.parametrize("case", DIGESTS)
@pytest.mark.filterwarnings("ignore:.* in no average")
def test_a_run_of_fp32_has_the_same_bits_as_before(case: str) -> None:
    options, expected = DIGESTS[case]
    options = {"total_steps": 12, "inner_steps": 2, "outer_lr": 0.7, "outer_momentum": 0.9, **options}
    dtype = options.pop("dtype", torch.float32)

    def body(where: Mapping[str, Any]) -> str:
        model = nn.Sequential(nn.Linear(37, 29), nn.Linear(29, 11)).to(dtype)
        rng = np.random.default_rng(where["rank"])
        digest = xxh3_128()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.from_numpy(np.random.default_rng(parameter.numel()).normal(size=parameter.shape)))
        with open_diloco(model, weight=1.0 + where["rank"], **options, **where) as diloco:
            for _ in range(12):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.from_numpy(0.1 * rng.normal(size=parameter.shape)).to(dtype))
                diloco.step()
                for values in diloco.anchor().values():
                    digest.update(values.numpy().tobytes())
        for parameter in model.parameters():
            digest.update(parameter.detach().float().numpy().tobytes())
        return digest.hexdigest()

    assert set(run_replicas(3, body)) == {expected}
