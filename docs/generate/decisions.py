"""Makes the page of decisions from the index of the ADRs."""

from __future__ import annotations

import re
from pathlib import Path

INDEX = Path(__file__).parents[2] / "ADRs" / "README.md"


def decisions_page() -> str:
    """Return the page that lists the decision records by subject. The records themselves are in the repository."""
    _, _, rest = INDEX.read_text(encoding="utf-8").partition("\n## ")
    listed = re.sub(r"\[(\d{4})\]\([^)]*\)", r"ADR \1", f"## {rest}")
    return (
        "# Decisions\n\nThe repository's folder `ADRs` has a record for each decision: what was decided, what was "
        "rejected and why, and how a test checks it. Read one when you want to know the reason "
        "for a part of the design.\n\n" + listed
    )
