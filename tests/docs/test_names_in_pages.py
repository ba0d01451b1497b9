"""A page names only files, folders and identifiers that exist, so a rename in the code shows each page that has it."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path, PurePath

from docs.pictures.rooms import ROOMS

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^ *(`{3,}).*?^ *\1 *$", re.M | re.S)
CODE = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
FILE = re.compile(r"(?<![\w.:/…{$-])(?:[\w-]+/)*[\w-]+\.(?:py|md|toml|txt|yml|ipynb|json|html)(?![\w:])")
FOLDER = re.compile(r"(?:[\w-]+/)+")
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NAME = re.compile(r"(?<![\w$<>{])[A-Za-z_][A-Za-z0-9_]*")
OF_THE_USER = {"requirements.txt", "results/results.json", "run.html", "docs/_build/html/index.html", "dist/"}
"""Files and folders that a user has, or that a command of the page writes."""
OF_OTHERS = {
    *("CallWrapper", "RetryController", "disable_hang_protection", "fn_exception"),
    *("soft_timeout", "hard_timeout", "termination_grace_time"),  # nvidia-resiliency-ext
    *("main_process_port", "device_map", "RAY_JOB_START_TIMEOUT_SECONDS", "REPLICAS_RESTARTS"),
}
"""Names of other projects, and a variable whose name is made from an option."""


@functools.cache
def tracked() -> list[str]:
    """Return the files of the repository."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    return listed.stdout.decode().split()


def code_of_pages() -> list[tuple[str, str]]:
    """Return each inline code of the pages that people write, with its page."""
    pages = [
        path
        for path in tracked()
        if path in ("README.md", "CONTRIBUTING.md", "SECURITY.md")
        or (path.startswith("docs/") and path.endswith(".md") and not path.startswith("docs/results/"))
    ]
    return [
        (page, " ".join(span.split()))
        for page in pages
        for span in CODE.findall(FENCE.sub("", (ROOT / page).read_text(encoding="utf-8")))
    ]


def exists(path: str, known: frozenset[str]) -> bool:
    return path in known or any(each.endswith(f"/{path}") for each in known)


def test_each_file_and_folder_that_a_page_names_exists() -> None:
    files = frozenset(tracked())
    folders = frozenset(str(folder) for path in files for folder in PurePath(path).parents)
    missing = []
    for page, span in code_of_pages():
        missing += [f"{page}: {name}" for name in set(FILE.findall(span)) - OF_THE_USER if not exists(name, files)]
        if FOLDER.fullmatch(span) and span not in OF_THE_USER and not exists(span.rstrip("/"), folders):
            missing.append(f"{page}: {span}")
    assert not missing, "\n".join(missing)


def test_each_name_that_a_page_has_in_code_is_a_name_of_the_sources() -> None:
    """A name has an underscore, or a capital letter inside. Other words may be plain English."""
    known = set(OF_OTHERS)
    for path in tracked():
        if path.split("/")[0] in ("executors", "diloco", "examples", "tests") or path in ("Makefile", "pyproject.toml"):
            known |= {*Path(path).stem.split("."), *WORD.findall((ROOT / path).read_text(errors="replace"))}
    missing = {
        f"{page}: {name}"
        for page, span in code_of_pages()
        for name in NAME.findall(span)
        if ("_" in name.strip("_") or re.search("[a-z][A-Z]", name)) and name not in known
    }
    assert not missing, "\n".join(sorted(missing))


def test_each_room_of_the_picture_exists() -> None:
    files = frozenset(tracked())
    folders = frozenset(str(folder) for path in files for folder in PurePath(path).parents)
    assert [name for name, _ in ROOMS if not exists(name.rstrip("/"), files | folders)] == []


def test_each_room_of_the_drawing_in_text_exists() -> None:
    page = (ROOT / "docs/development/architecture.md").read_text(encoding="utf-8")
    drawing = page.partition(":class: shape")[2].partition("```")[0]
    files = frozenset(tracked())
    folders = frozenset(str(folder) for path in files for folder in PurePath(path).parents)
    named = re.findall(r"(?<![\w.])[a-z_]+(?:/|\.py)", drawing)
    assert len(named) > 20
    assert [name for name in named if not exists(name.rstrip("/"), files | folders)] == []
