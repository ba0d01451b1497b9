"""Background rounds of a training on a CUDA device give the same result as on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from diloco.fragments import plan_fragments
from diloco.live_parameters import BufferPool, HeldWork

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_work_held_and_merged_on_a_device_has_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    merged = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Linear(300, 70).to(dtype).to(device)
        (fragment,) = plan_fragments(model, 1, sync_buffers=False)
        anchor = torch.randn(fragment.n_elements)
        shadow = HeldWork(model, fragment, anchor, BufferPool(fragment.n_elements, keeps=True))
        with torch.no_grad():
            shadow.hold("I")
            for parameter in model.parameters():
                parameter.add_(1.0)  # the training continues at once
            held = torch.cat([values.reshape(-1).cpu() for _, values in shadow.values()])
            shadow.remove_held()
            anchor.sub_(0.5)
            shadow.after_step()
            shadow.prepare_merge()
            shadow.merge()
        merged.append([held, *(parameter.detach().cpu() for parameter in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*merged, strict=True))
