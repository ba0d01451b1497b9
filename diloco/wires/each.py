"""The mean wire `each`: no mean is stored, and each replica computes it from all contributions.

In memory such a mean has the form of `fp32`. It is never rounded, and it costs no bytes beyond the contributions. So
few replicas move the fewest bytes with it. ADR 0084 has the numbers.
"""

from __future__ import annotations

from diloco.wires.fp32 import Fp32


class Each(Fp32):
    """The form in memory of a mean that is not stored."""

    name = "each"
