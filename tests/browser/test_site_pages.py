"""The pages of the documentation in a real browser: no page scrolls sideways or has an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.build_docs import build_site

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_site(tmp_path_factory.mktemp("site"))


@pytest.mark.parametrize("width", [400, 1280])
def test_no_page_scrolls_sideways_or_complains(browser: Any, site: Path, width: int) -> None:
    complaints: list[str] = []
    tab = browser.new_page(viewport={"width": width, "height": 900})
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    too_wide = {}
    for path in sorted(site.rglob("*.html")):
        tab.goto(path.as_uri())
        needed = tab.evaluate("document.documentElement.scrollWidth")
        if needed > width:
            too_wide[str(path.relative_to(site))] = needed
    tab.close()
    assert (too_wide, complaints) == ({}, [])
