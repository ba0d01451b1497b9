"""The settings of the site: `make docs` builds it into `docs/_build/html`, without network."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from sphinx.application import Sphinx

from docs.generate.column_names import with_column_names
from docs.generate.llms import write_texts
from docs.generate.pages import write_pages

project = "replicas"
author = "The authors of replicas"
copyright = "2026, the authors of replicas"
extensions = ["myst_parser", "sphinx_design", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3
smartquotes = False  # else `--n` would become a dash
exclude_patterns = ["_build", "generate"]
nitpicky = True
suppress_warnings: list[str] = []

html_theme = "pydata_sphinx_theme"
html_title = "replicas"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "navbar_start": ["navbar-logo"],
    "navbar_persistent": ["search-button"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_toc_level": 2,
    "navigation_with_keys": False,
}
html_context = {"default_mode": "auto"}
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True

write_pages()


def _write_texts(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        write_texts(sorted(app.env.found_docs), Path(app.srcdir), Path(app.outdir))


def _name_columns(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    if "body" in context:
        context["body"] = with_column_names(context["body"])


def setup(app: Sphinx) -> None:
    app.connect("html-page-context", _name_columns)
    app.connect("build-finished", _write_texts)
