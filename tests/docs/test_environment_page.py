"""The page of environment variables names each variable of the product that the code reads or sets."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
VARIABLE = re.compile(r"""["'](REPLICAS?_[A-Z0-9_]*[A-Z0-9])["']""")


def test_each_variable_of_the_product_is_on_the_page_of_variables() -> None:
    page = (ROOT / "docs/reference/environment.md").read_text(encoding="utf-8")
    files = [path for package in ("executors", "diloco") for path in (ROOT / package).rglob("*.py")]
    read = {name for path in files for name in VARIABLE.findall(path.read_text(encoding="utf-8"))}
    assert len(read) > 20
    assert sorted(name for name in read if f"`{name}`" not in page) == []
