"""Each code block of the documentation runs, and prints what its page shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pages import DOCS, PageRun, blocks_of, check_command, check_fragment, commands_of, is_as_expected

from docs.generate.pages import PAGES as FROM_CODE

BY_HAND = sorted(
    str(path.relative_to(DOCS))
    for path in DOCS.rglob("*.md")
    if "_build" not in path.parts and str(path.relative_to(DOCS)) not in FROM_CODE
)


@pytest.mark.parametrize("page", BY_HAND)
def test_the_blocks_of_a_page_do_what_the_page_shows(page: str, tmp_path: Path) -> None:
    PageRun(DOCS / page, tmp_path / "folder", tmp_path / "home").run()


def test_each_page_has_commands_that_are_accepted_and_code_that_compiles() -> None:
    """This check is quick, so `make test` makes it for each page. `make test-all` also runs the slow pages."""
    wrong = []
    for page in BY_HAND:
        for block in blocks_of((DOCS / page).read_text(encoding="utf-8")):
            try:
                if block.kind == "shape":
                    continue
                if block.language == "python":
                    check_fragment(block.text)
                elif block.language == "console":
                    for command, _ in commands_of(block.text):
                        # the settings file with these profiles exists only while the page runs
                        if "--profile" not in command:
                            check_command(command)
            except AssertionError as error:
                wrong.append(f"docs/{page}, line {block.line}: {error}")
    assert not wrong, "\n".join(wrong)


# ------------------------------------------------------------------------------------ the runner itself


def run_text(text: str, tmp_path: Path) -> None:
    path = DOCS / "page-of-a-test.md"
    run = PageRun(path, tmp_path / "folder", tmp_path / "home")
    for block in blocks_of(text):
        run._handle(block)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("```python\nprint(1)\n```\n```text\n2\n```\n", "it printed"),
        ("```python\nraise SystemExit(3)\n```\n", "exit code 3"),
        ("```console\n$ echo hello\nhullo\n```\n", "it printed"),
        ("```console\n$ false\n```\n", "exit code 1"),
        ("```ruby\nputs 1\n```\n", "no rule"),
        ("```{code-block} console\n:class: cloud\n$ replicas lunch train.py\n```\n", "no verb 'lunch'"),
        ("```{code-block} console\n:class: cloud\n$ replicas launch train.py --many 3\n```\n", "--many"),
        ("```{code-block} python\n:class: fragment\nlaunch('local', train, nn=4)\n```\n", "no parameter"),
        ("```{code-block} python\n:class: fragment\nrun.statuses()\n```\n", "has no 'statuses'"),
    ],
)
def test_a_block_that_does_not_do_what_the_page_shows_fails(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=words):
        run_text(text, tmp_path)


def test_a_file_of_a_page_is_there_for_its_commands(tmp_path: Path) -> None:
    run_text(
        "```{code-block} python\n:caption: one.py\nprint(6 * 7)\n```\n```console\n$ python one.py\n42\n```\n", tmp_path
    )


def test_an_expected_output_leaves_times_names_and_omitted_lines_open() -> None:
    expected = "clever-sparrow-01a4: 4 replicas\n[ 0.1 s] ranks 0-3 running\n…\n[  41 s] rank 0 …\n"
    assert is_as_expected(
        "quiet-fox-ff00: 4 replicas\n[0.3 s] ranks 0-3 running\n[ 2 s] a\nb\n[12.5 s] rank 0 succeeded\n", expected
    )
    assert not is_as_expected("quiet-fox-ff00: 3 replicas\n[0.3 s] ranks 0-3 running\n[12.5 s] rank 0 ok\n", expected)


def test_a_command_may_continue_on_the_next_line() -> None:
    assert list(commands_of("$ echo a \\\n    b\na b\n$ true\n")) == [("echo a \\\n    b", "a b"), ("true", "")]


def test_a_right_command_and_a_right_fragment_pass() -> None:
    check_command("AWS_PROFILE=x replicas launch train.py:main --n 4 --backend modal && replicas status RUN")
    check_fragment("run = launch('modal', train, n=4, gpu='H100')\nrun.wait(timeout=3)\n")
