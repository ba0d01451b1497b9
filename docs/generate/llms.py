"""Writes `llms.txt` and `llms-full.txt` beside the pages: the site as text, for programs that read it."""

from __future__ import annotations

import re
from pathlib import Path

TITLE = "# replicas\n\n> Train one PyTorch model on many machines that share nothing but a bucket.\n"


def write_texts(pages: list[str], sources: Path, out: Path) -> None:
    """Write both files, and each page's Markdown beside its HTML.

    Args:
        pages: The names of the pages, without suffix, such as `how-to/slurm`.
        sources: The folder of the Markdown files.
        out: The folder of the built site.
    """
    lines, texts = [TITLE], []
    for page in sorted(pages):
        text = (sources / f"{page}.md").read_text(encoding="utf-8")
        (out / f"{page}.md").write_text(text, encoding="utf-8")
        lines.append(f"- [{title_of(text)}]({page}.md): {summary_of(text)}")
        texts.append(text)
    (out / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (out / "llms-full.txt").write_text("\n\n".join(texts), encoding="utf-8")


def title_of(text: str) -> str:
    """Return the heading of a page, without marks of code."""
    heading = next((line for line in text.split("\n") if line.startswith("# ")), "# ")
    return heading.removeprefix("# ").replace("`", "")


def summary_of(text: str) -> str:
    """Return the first sentence of a page's first paragraph. An index has none, and lists its pages."""
    prose = re.sub(r"^(`{3,}|:{3,}).*?^\1 *$", "", text, flags=re.MULTILINE | re.DOTALL)
    paragraphs = [part for part in prose.split("\n\n") if part.strip() and part.lstrip()[0] not in "#(:%{|"]
    return " ".join(paragraphs[0].split()).partition(". ")[0].rstrip(".") + "." if paragraphs else "A list of pages."
