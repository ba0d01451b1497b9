"""The hardware flavors of Hugging Face Jobs, as the vendor's documentation lists them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Name, pretty name, vCPUs, RAM in GB, storage in GB, accelerators, their model and memory in GB, US dollars an hour.
TABLE = """
cpu-basic       | CPU Basic              |   2 |   16 |    50 |                          | 0.01
cpu-upgrade     | CPU Upgrade            |   8 |   32 |    50 |                          | 0.03
cpu-performance | CPU Performance        |  32 |  256 |  1024 |                          | 1.90
cpu-xl          | CPU XL                 |  16 |  124 |  1000 |                          | 1.00
t4-small        | Nvidia T4 - small      |   4 |   15 |    50 | 1 x T4 x 16              | 0.40
t4-medium       | Nvidia T4 - medium     |   8 |   30 |   100 | 1 x T4 x 16              | 0.60
a10g-small      | Nvidia A10G - small    |   4 |   15 |   110 | 1 x A10G x 24            | 1.00
a10g-large      | Nvidia A10G - large    |  12 |   46 |   200 | 1 x A10G x 24            | 1.50
a10g-largex2    | 2x Nvidia A10G - large |  24 |   92 |  1000 | 2 x A10G x 48            | 3.00
a10g-largex4    | 4x Nvidia A10G - large |  48 |  184 |  2000 | 4 x A10G x 96            | 5.00
a100-large      | Nvidia A100 - large    |  12 |  142 |  1000 | 1 x A100 x 80            | 2.50
a100x4          | 4x Nvidia A100         |  48 |  568 |  4000 | 4 x A100 x 320           | 10.00
a100x8          | 8x Nvidia A100         |  96 | 1136 |  8000 | 8 x A100 x 640           | 20.00
h200            | Nvidia H200            |  23 |  256 |  3000 | 1 x H200 x 141           | 5.00
h200x2          | Nvidia H200            |  46 |  512 |  6000 | 2 x H200 x 282           | 10.00
h200x4          | Nvidia H200            |  92 | 1024 | 12000 | 4 x H200 x 564           | 20.00
h200x8          | Nvidia H200            | 184 | 2048 | 24000 | 8 x H200 x 1128          | 40.00
rtx-pro-6000    | Nvidia RTX PRO 6000    |  23 |  256 |   475 | 1 x RTX PRO 6000 x 96    | 2.75
rtx-pro-6000x2  | Nvidia RTX PRO 6000    |  46 |  512 |   950 | 2 x RTX PRO 6000 x 192   | 5.50
rtx-pro-6000x4  | Nvidia RTX PRO 6000    |  92 | 1024 |  1900 | 4 x RTX PRO 6000 x 384   | 11.00
rtx-pro-6000x8  | Nvidia RTX PRO 6000    | 184 | 2048 |  3800 | 8 x RTX PRO 6000 x 768   | 22.00
l4x1            | 1x Nvidia L4           |   8 |   30 |   400 | 1 x L4 x 24              | 0.80
l4x4            | 4x Nvidia L4           |  48 |  186 |  3200 | 4 x L4 x 96              | 3.80
l40sx1          | 1x Nvidia L40S         |   8 |   62 |   380 | 1 x L40S x 48            | 1.80
l40sx4          | 4x Nvidia L40S         |  48 |  382 |  3200 | 4 x L40S x 192           | 8.30
l40sx8          | 8x Nvidia L40S         | 192 | 1534 |  6500 | 8 x L40S x 384           | 23.50
"""


@dataclass(frozen=True)
class Flavor:
    name: str
    pretty_name: str
    cpus: int
    memory_gb: int
    storage_gb: int
    accelerator: tuple[str, ...]
    """Number, model and memory in GB of the accelerators. Empty: the hardware has only CPUs."""
    dollars_an_hour: float

    def environment(self) -> dict[str, str]:
        """Return the environment variables that describe the hardware to a job."""
        return {
            "ACCELERATOR": self.name if self.accelerator else "none",
            "CPU_CORES": str(self.cpus),
            "MEMORY": f"{self.memory_gb}Gi",
        }

    def to_wire(self) -> dict[str, Any]:
        accelerator = None
        if self.accelerator:
            quantity, model, memory_gb = self.accelerator
            accelerator = {
                "type": "gpu",
                "model": model,
                "quantity": quantity,
                "vram": f"{memory_gb} GB",
                "manufacturer": "Nvidia",
            }
        micro_dollars = round(self.dollars_an_hour / 60 * 1e6)
        return {
            "name": self.name,
            "prettyName": self.pretty_name,
            "cpu": f"{self.cpus} vCPU",
            "ram": f"{self.memory_gb} GB",
            "ephemeralStorage": f"{self.storage_gb} GB",
            "accelerator": accelerator,
            "unitCostMicroUSD": micro_dollars,
            "unitCostUSD": micro_dollars / 1e6,
            "unitLabel": "minute",
        }


def _flavor(row: str) -> Flavor:
    name, pretty_name, cpus, memory_gb, storage_gb, accelerator, dollars = (cell.strip() for cell in row.split("|"))
    parts = tuple(accelerator.split(" x ")) if accelerator else ()
    return Flavor(name, pretty_name, int(cpus), int(memory_gb), int(storage_gb), parts, float(dollars))


FLAVORS = {flavor.name: flavor for flavor in map(_flavor, TABLE.strip().splitlines())}
