"""The texts of this project keep the rules of `language.py`, and each rule finds what it is meant to find.

README, `docs/` and the help texts have no exceptions. Each other file has a ceiling in `language_ceilings.json`, which
is a number of findings that may only fall.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import language
import pytest
from language import LOWER, ROOT, Block, Finding, check_sentence, report_of_blocks, sentences_of

LONG = (
    "The supervisor starts each replica again, " + "and it reads the newest snapshot from the store, " * 4 + "at once."
)


def rules_of(text: str, kind: str = "docstring") -> set[str]:
    """Return the names of the rules that a text breaks."""
    return {rule for sentence in sentences_of(Block(kind, 1, text)) for rule, _ in check_sentence(sentence)}


def listed(findings: list[Finding]) -> str:
    return "\n".join(map(str, findings))


# -------------------------------------------------------------------------------- the texts themselves


@pytest.mark.parametrize("path", language.perfect_pages())
def test_a_page_for_users_has_no_finding(path: str) -> None:
    findings = list(language.report_of(path).findings)
    assert not findings, listed(findings)


def test_the_help_texts_have_no_finding() -> None:
    findings = [
        finding
        for name, text in language.help_texts()
        for paragraph in text.split("\n\n")
        for finding in report_of_blocks(name, [Block("help", 0, paragraph)]).findings
    ]
    assert not findings, listed(findings)


def ceilings() -> dict[str, int]:
    return language.read_ceilings(language.CEILINGS.read_text(encoding="utf-8"))


def test_no_file_has_more_findings_than_its_ceiling() -> None:
    counts = {path: len(report.findings) for path, report in language.reports().items()}
    over, _ = language.compare(ceilings(), counts)
    lines = [f"{path}: {counts[path]} findings, its ceiling is {ceilings().get(path, 0)}" for path in over]
    hint = f"To see the findings: python -m tests.docs.language {' '.join(over)}"
    assert not over, "\n".join(["Rewrite some sentences in these files.", *lines, hint])


def test_a_ceiling_is_lowered_when_a_file_has_fewer_findings() -> None:
    counts = {path: len(report.findings) for path, report in language.reports().items()}
    _, under = language.compare(ceilings(), counts)
    lines = [f"{path}: {counts.get(path, 0)} findings, its ceiling is {ceilings()[path]}" for path in under]
    assert not under, "\n".join([f"Thank you. Now run: {LOWER}", *lines])


def test_the_ceilings_have_one_line_for_each_file_in_order() -> None:
    text = language.CEILINGS.read_text(encoding="utf-8")
    assert text == language.write_ceilings(ceilings()), f"Run: {LOWER}"


# ------------------------------------------------------------------------------ the rules of sentences


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("long sentence", LONG),
        ("colons", "The end of a replica: the supervisor records it; the controller restarts it."),
        ("subject", "What ends is started again."),
        ("subject", "Who reads a run believes no clock."),
        ("subject", "Of the attempts, the newest counts."),
        ("subject", "The run has ended. What is left is deleted."),
        ("subject", "*What* counts is a seal."),
        ("that of", "It is that of the launch."),
        ("that of", "The options are those of a run."),
        ("to be had", "The backend is not to be had here."),
        ("to be had", "A machine cannot be had."),
        ("is no X", "A process that is no replica trains alone."),
        ("told", "The replica is told its rank."),
        ("says", "The service says that the job has ended."),
        ("says", "`status` says so."),
        ("says", "Replicas say so."),
        ("stands", "The log stands in the store."),
        ("fares", "It shows how a job fares."),
        ("goes on", "The run goes on without it."),
        ("goes on", "Go on until the run ends."),
        ("is over", "The run is over, and its jobs are gone."),
        ("let go", "Another process has let the run go."),
        ("anew", "The replica begins anew."),
        ("as many", "There are 8 replicas and as many seals."),
        ("as many", "It waits for so many seconds."),
        ("nobody", "Nobody watches the run."),
        ("nobody", "Wake whoever waits."),
        ("nobody", "It was ended by a person."),
        ("wire", "What a wire leaves out goes with the next round."),
        ("have done", "Have a job done when those before it are."),
        ("is to be", "The rank is to be started."),
        ("beside", "Rounds run beside the training."),
        ("unlike", "Replicas of unlike speeds meet by the clock."),
        ("belongs into", "The option belongs into the table of its backend."),
        ("contraction", "The store doesn't answer."),
        ("contraction", "It's a directory."),
        ("exclamation mark", "The run has ended!"),
        ("British spelling", "The model is initialised."),
        ("British spelling", "The behaviour differs."),
        ("British spelling", "Fragments are synchronised in turn."),
    ],
)
def test_a_rule_finds_its_pattern(rule: str, text: str) -> None:
    assert rule in rules_of(text)


@pytest.mark.parametrize(
    "text",
    [
        "The supervisor restarts the replica, and the replica reads the newest snapshot.",
        "Exit codes: 0, 1 and 2.",
        "See `a: b; c: d` for both: they are code.",
        'It prints "done: all; nothing left", then ends: the rest is skipped.',
        "The url is s3://bucket/prefix?a=1;b=2: a bucket.",
        "What does the run cost?",
        "What is not covered: two writers with the same bytes.",
        "What to do with a damaged file is in the message.",
        "Of course the store may fail.",
        "The command prints what it would start.",
        "The user who launched the run owns it.",
        "Most of the replicas have ended.",
        "All of those are copies.",
        "There is no server, and there are no open ports.",
        "The copy is no longer needed.",
        "The limit is no larger than 30 minutes.",
        "A message says so.",
        "One line says which ranks wait.",
        "The README says where a backend goes.",
        "The attempt has a boot.json that says how far it is, and `run.json` says more.",
        "The user said so.",
        "N stands for the number of replicas.",
        "A spare stands by.",
        "The test runs on the CPU, and goes on the list.",
        "The message is sent over the network.",
        "The round is over the limit.",
        "It retries as many times as the policy allows.",
        "There were so many calls that the server refused some.",
        "A personal token is enough.",
        "The work is done when the seal exists.",
        "The run has a task that is done.",
        "The value was to the left of the mark.",
        "The replica's own clock decides, not the others' clocks.",
        "Do not use it if x != y.",
        "The exercise is precise, and otherwise nothing is compromised or revised.",
        "The optimizer is initialized, and the job is cancelled.",
        "Paths differ, e.g. on a Mac, i.e. without Linux.",
        "Unlike a directory, a bucket has no watch.",
        "ReplicaError: a replica gave no result.",
    ],
)
def test_good_english_passes(text: str) -> None:
    assert rules_of(text) == set()


def test_a_sentence_ends_at_a_full_stop_and_code_counts_as_one_word() -> None:
    text = "Use `launch('local', train, n=4, args={'a': 1})`. For 3.11 read v1.2 of it. torch is optional."
    sentences = list(sentences_of(Block("page", 1, text)))
    assert [each.words for each in sentences] == [2, 6, 3]
    assert sentences[0].text == "Use `launch('local', train, n=4, args={'a': 1})`."


def test_a_message_may_name_its_subject_and_quote_an_error() -> None:
    text = f"rank {language.VALUE}: the store does not answer: {language.VALUE}"
    assert rules_of(text, "string") == set()
    assert rules_of(text, "docstring") == {"colons"}


def test_a_heading_may_be_a_question_without_a_mark() -> None:
    assert rules_of("What a run leaves", "heading") == set()


@pytest.mark.parametrize("text", ["the same, with `overlap`.", "as for `launch`.", "see `wait`."])
def test_a_parameter_is_not_defined_by_another(text: str) -> None:
    assert "defined by another" in rules_of(text, "argument")


@pytest.mark.parametrize(
    "text", ["the same for all replicas.", "seconds; as for a clock, it never falls.", "a mapping."]
)
def test_a_parameter_may_be_compared_with_another(text: str) -> None:
    assert rules_of(text, "argument") == set()


# --------------------------------------------------------------------------------- the texts of a file


def texts_of(source: str) -> list[tuple[str, str]]:
    nodes = language.nodes_of(ast.parse(source))
    blocks = sorted(language.blocks_of_python(source, nodes), key=lambda block: block.line)
    return [(block.kind, block.text) for block in blocks]


def test_the_texts_of_a_file_are_its_docstrings_comments_and_messages() -> None:
    source = '''"""A module."""

LIMIT = 3  # the reason for three
"""The string behind a constant."""


def f(x):
    """Do this.

    Then that, on
    two lines:

        f(3)  # an example

    - an item
    - another

    Args:
        x: a number, which
            has a unit.
        y (int): another.

    Returns:
        A value.

    Example:
        f(x)
    """
    # One comment
    # on two lines.
    if x == "#":  # noqa: PLR2004 - with a reason
        raise ValueError(
            f"{x} is not a number "
            "that this accepts."
        )
    return {"key with four plain words: 1": r"\\d+ [a-z]+ of (?P<x>.*) is"}
'''
    assert texts_of(source) == [
        ("docstring", "A module."),
        ("comment", "the reason for three"),
        ("docstring", "The string behind a constant."),
        ("docstring", "Do this."),
        ("docstring", "Then that, on two lines:"),
        ("docstring", "an item"),
        ("docstring", "another"),
        ("argument", "a number, which has a unit."),
        ("argument", "another."),
        ("docstring", "A value."),
        ("comment", "One comment on two lines."),
        ("comment", "with a reason"),
        ("string", f"{language.VALUE} is not a number that this accepts."),
        ("string", "key with four plain words: 1"),
    ]


def test_the_texts_of_a_page_are_its_paragraphs_items_and_cells_without_code() -> None:
    page = """# A title

A paragraph with [a link](https://example.org)
on two lines.

- an item
  that continues
- another

```sh
what is code
```

    what is code, too

| what | cell |
|---|---|
| one | two |
"""
    assert [(block.kind, block.text) for block in language.blocks_of_page(page)] == [
        ("heading", "A title"),
        ("page", "A paragraph with [a link](https://example.org) on two lines."),
        ("page", "an item that continues"),
        ("page", "another"),
        ("heading", "what"),
        ("page", "cell"),
        ("page", "one"),
        ("page", "two"),
    ]


@pytest.mark.parametrize(
    "text",
    ["SELECT a FROM b WHERE c", "a/b c/d e/f g/h", "x = 1\nimport os and more words", "{a} or {b} or {c} or more"],
)
def test_a_string_of_code_is_not_a_message(text: str) -> None:
    assert not language.is_prose(text)


def test_a_string_of_words_is_a_message() -> None:
    assert language.is_prose("The store does not answer.")


# ----------------------------------------------------------------------------------------------- names


def names_found(source: str, path: str = "executors/run/x.py") -> list[str]:
    nodes = language.nodes_of(ast.parse(source))
    return [f"{finding.rule}: {finding.text}" for finding in language.check_names(path, nodes)]


def test_a_banned_noun_in_the_name_of_a_class_is_found() -> None:
    assert names_found("class LaunchSpread: ...") == ["banned noun: LaunchSpread"]


def test_a_longer_word_or_a_function_may_have_the_letters_of_a_banned_noun() -> None:
    assert names_found("class SpreadsheetHandshake: ...\ndef answers(): ...\nclass Website: ...") == []


def test_an_old_name_is_found_where_it_is_old() -> None:
    assert names_found("class Liaison: ...\nclass Look: ...") == ["old name: Look", "old name: Liaison"]
    assert names_found("def settle(): ...", "executors/run/run_index.py") == ["old name: settle"]
    assert names_found("def settle(): ...", "executors/store/file.py") == []


def test_the_name_of_a_file_is_checked() -> None:
    assert [each.rule for each in language.check_file_name("executors/run/fleet.py")] == ["banned noun"]
    assert [each.rule for each in language.check_file_name("executors/report/words.py")] == ["old name"]
    assert list(language.check_file_name("executors/store/file.py")) == []


# ---------------------------------------------------------------------------------------- public names


def public_findings(source: str) -> list[str]:
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef | ast.FunctionDef)
    return [f"{finding.rule}: {finding.text}" for finding in language.check_public("x.py", node)]


def test_a_public_function_describes_each_parameter_and_has_an_example() -> None:
    source = '''def f(a, b, *rest, c=1, _d=2):
    """Do it.

    Args:
        a, b: numbers.
    """
'''
    assert public_findings(source) == ["no example: f", "no Args: f(c)", "no Args: f(rest)"]


def test_a_complete_public_class_passes() -> None:
    source = '''class C:
    """A thing.

        c = C(3)

    Args:
        a: a number.
    """

    def __init__(self, a): ...
    def _private(self, b): ...
    def test_it(self, fixture): ...
'''
    assert public_findings(source) == []


def test_an_example_alone_below_the_first_line_is_an_example() -> None:
    source = '\ndef f():\n    """Do it.\n\n        f()\n    """\n'
    assert public_findings(source) == []
    assert texts_of(source) == [("docstring", "Do it.")]


def test_the_public_names_are_those_that_users_import() -> None:
    names = {node.name for _, node in language.public_definitions()}
    assert {"launch", "Run", "DiLoCo", "Store", "ExecutorContract", "open_store", "run_replicas"} <= names


def test_a_public_method_has_an_example_of_its_own_or_in_the_example_of_its_class() -> None:
    source = '''class C:
    """A thing.

        C().go(1)
    """

    def go(self, a):
        """Go.

        Args:
            a: a number.
        """

    def stop(self):
        """Stop."""

    @property
    def size(self):
        """The size."""
'''
    assert public_findings(source) == ["no example: C.stop"]


# ------------------------------------------------------------------------------- one meaning of a name


def test_a_name_that_two_files_define_is_found_in_both() -> None:
    found = language.homonyms_of([
        ("executors/run/a.py", 3, "settle"), ("diloco/b.py", 5, "settle"), ("diloco/b.py", 9, "Other"),
    ])  # fmt: skip
    assert found == {"settle": [("executors/run/a.py", 3), ("diloco/b.py", 5)]}


@pytest.mark.parametrize("path", ["executors/cli/launch.py", "executors/launcher/x.py"])
def test_a_verb_may_have_the_name_of_the_function_that_it_calls(path: str) -> None:
    is_of_command = path.startswith("executors/cli/")
    found = language.homonyms_of([(path, 3, "launch"), ("executors/launcher/__init__.py", 5, "launch")])
    assert (found == {}) == is_of_command


def test_names_with_one_meaning_are_defined_more_than_once() -> None:
    defined = Counter(
        node.name
        for package in language.PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for node in language.tree_of(path).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    )
    assert {name for name in language.SAME_MEANING if defined[name] < 2} == set(), (
        "SAME_MEANING has a name that is defined only once: remove the name"
    )


# ------------------------------------------------------------------------------------------- README


def test_the_sentences_of_the_readme_are_short() -> None:
    report = language.report_of("README.md")
    assert report.words / report.sentences <= 16
    paragraphs = language.blocks_of_page((ROOT / "README.md").read_text(encoding="utf-8"))
    longest = max(sentence.words for block in paragraphs for sentence in sentences_of(block))
    assert longest <= language.MAX_WORDS


# ---------------------------------------------------------------------------------------- the ceilings


def test_ceilings_fall_and_never_rise() -> None:
    before = {"a.py": 3, "b.py": 1, "gone.py": 2}
    counts = {"a.py": 1, "b.py": 5, "new.py": 1}
    assert language.compare(before, counts) == (["b.py", "new.py"], ["a.py", "gone.py"])
    assert language.lowered(before, counts) == {"a.py": 1, "b.py": 1, "gone.py": 0}


def test_ceilings_are_read_from_both_sides_of_a_merge() -> None:
    text = '{\n<<<<<<< HEAD\n "a.py": 3,\n "b.py": 2\n=======\n "a.py": 1,\n>>>>>>> x\n "c.py": 4\n}\n'
    assert language.read_ceilings(text) == {"a.py": 1, "b.py": 2, "c.py": 4}


def test_ceilings_are_written_one_line_for_each_file_in_order() -> None:
    text = language.write_ceilings({"b.py": 1, "a.py": 2, "clean.py": 0})
    assert text == '{\n "a.py": 2,\n "b.py": 1\n}\n'
    assert language.read_ceilings(text) == {"a.py": 2, "b.py": 1}


def test_the_ceiling_of_a_renamed_file_moves_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = tmp_path / "ceilings.json"
    stored.write_text(language.write_ceilings({"old.py": 3}))
    monkeypatch.setattr(language, "CEILINGS", stored)
    assert language.main(["--move", "old.py", "new.py"]) == 0
    assert language.read_ceilings(stored.read_text()) == {"new.py": 3}


def test_a_finding_names_its_place() -> None:
    (finding,) = report_of_blocks("a.md", [Block("page", 7, "The run goes on.")]).findings
    assert str(finding).startswith("a.md:7 [goes on] 'goes on': write: continues")
    assert (ROOT / "README.md").is_file()
