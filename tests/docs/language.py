"""The rules of language that a machine can check, and the command that shows and lowers what is left to mend.

    python -m tests.docs.language                     counts by folder, file and rule; the length of sentences
    python -m tests.docs.language PATH…               every finding of these files or folders
    python -m tests.docs.language --lower             lower the ceilings of files that have fewer findings now
    python -m tests.docs.language --move OLD NEW      give the ceiling of a renamed file to its new path

Most rules read the sentences of docstrings, comments, strings, pages and help texts. They skip code and quotations. The
other rules read names, and the docstrings of the public classes and functions.

A rule that flags good English is worse than no rule. So each rule finds one pattern that is nearly always wrong, and
`test_language.py` has sentences beside each that must pass.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path

from docs.generate.pages import PAGES as PAGES_FROM_CODE

ROOT = Path(__file__).parents[2]
CEILINGS = Path(__file__).with_name("language_ceilings.json")
SOURCES = ("executors", "diloco", "examples", "docs", "tests/support", "tests/servers")
PAGES = ("examples/**/*.md",)
PERFECT_PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "ADRs/*.md")
"""These pages have no ceiling: each finding in them fails the test."""
PUBLIC = ("executors", "diloco", "executors.testing", "diloco.testing")
LOWER = "python -m tests.docs.language --lower"

MAX_WORDS = 35
GOOD_AVERAGE = 18  # reported, and not tested


@dataclass(frozen=True)
class Finding:
    """One place that breaks a rule.

    Attributes:
        path: The file, relative to the root of the repository, or the name of a help text.
        line: The line of the first word, or 0 for a help text.
        rule: The name of the rule.
        text: The sentence or the name.
        advice: The words that break the rule, and what to write.
    """

    path: str
    line: int
    rule: str
    text: str
    advice: str

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}" if self.line else self.path
        return f"{where} [{self.rule}] {self.advice}\n    {self.text}"


# ------------------------------------------------------------------------------------------- sentences


@dataclass(frozen=True)
class Block:
    """A paragraph, an item of a list, a cell of a table, a comment, or a string.

    Attributes:
        kind: `docstring`, `argument`, `comment`, `string`, `page`, `heading` or `help`.
        line: The number of its first line.
        text: Its words.
        last_line: The number of its last line.
    """

    kind: str
    line: int
    text: str
    last_line: int = 0


@dataclass(frozen=True)
class Sentence:
    """A sentence of a block.

    Attributes:
        kind: The kind of its block.
        line: The first line of its block.
        text: The sentence as its author wrote it.
        plain: The sentence with `STAND_IN` in place of each piece of code, quotation and address.
        lower: The same in lower case.
    """

    kind: str
    line: int
    text: str
    plain: str
    lower: str

    @cached_property
    def words(self) -> int:
        return len(WORD.findall(self.plain))


STAND_IN = "ⵣ"  # a letter that no text here has, so that a piece of code counts as one word
FILE = "ⵥ"  # in place of the name of a document, which may be the subject of a sentence
VALUE = "ⵤ"  # in place of a value in an f-string
WORD = re.compile(r"[^\s—–/]*\w[^\s—–/]*")
SPECIAL = re.compile(
    r"""``.*?``|`[^`]*`|"[^"\n]*"|“[^”]*”|(?<!\w)'[^'\n]*'(?!\w)|\b[a-z0-9+]+://[^\s)]+""",
    re.DOTALL,
)
"""Code, quotations and addresses."""
DOCUMENT = re.compile(r"[\w./<>-]+\.(?:json|jsonl|md|toml|txt|html|yml)")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)\s]*\)")
ABBREVIATION = re.compile(r"(?:^|[\s(])(?:e\.g|i\.e|vs|cf|approx|[A-Z])\.$")
END = re.compile(r"(?<=[.?!])[)\]*_]*\s+(?=\S)|(?<=[.?!]\))\s+(?=\S)")


def plain_of(text: str) -> tuple[str, list[str]]:
    """Return a text with `STAND_IN` in place of each piece of code, quotation and address, and these pieces.

    Args:
        text: A paragraph, with the marks of Markdown or of a docstring.
    """
    pieces: list[str] = []

    def keep(match: re.Match[str]) -> str:
        pieces.append(match[0])
        return FILE if DOCUMENT.fullmatch(match[0].strip("`")) else STAND_IN

    return SPECIAL.sub(keep, LINK.sub(r"\1", text)).replace("**", ""), pieces


def sentences_of(block: Block) -> Iterator[Sentence]:
    """Yield the sentences of a block."""
    plain, pieces = plain_of(" ".join(block.text.split()))
    ends = [match for match in END.finditer(plain) if not ABBREVIATION.search(plain, 0, match.start())]
    waiting = iter(pieces)
    start = 0
    for end in (*(match.end() for match in ends), len(plain)):
        part = plain[start:end].strip()
        start = end
        if part:
            text = re.sub(f"[{STAND_IN}{FILE}]", lambda _: next(waiting), part)
            yield Sentence(block.kind, block.line, text.replace(VALUE, "{…}"), part, part.lower())


# ---------------------------------------------------------------------------------- rules of sentences


@dataclass(frozen=True)
class Rule:
    """A rule about one sentence.

    Attributes:
        name: The name of the rule, for messages.
        find: Returns the words that break the rule, or None.
        advice: What to write.
    """

    name: str
    find: Callable[[Sentence], str | None]
    advice: str


def pattern(name: str, expression: str, advice: str) -> Rule:
    """Return a rule that finds a regular expression in a sentence.

    Args:
        name: The name of the rule.
        expression: The regular expression, in lower case. It is searched in the text without code and quotations.
        advice: What to write.
    """
    compiled = re.compile(expression)

    def find(sentence: Sentence) -> str | None:
        match = compiled.search(sentence.lower)
        return match[0].strip() if match else None

    return Rule(name, find, advice)


SUBJECT_OF_MESSAGE = re.compile(r"(?:[^\s:;]+ ){0,2}[^\s:;]+: ")
DETAIL_OF_MESSAGE = re.compile(rf": (?:{VALUE}|%s)\.?$")


def _too_long(sentence: Sentence) -> str | None:
    return f"{sentence.words} words" if sentence.words > MAX_WORDS else None


def _two_colons(sentence: Sentence) -> str | None:
    text = sentence.plain
    if sentence.kind == "string":  # as `rank 3: the store does not answer: TimeoutError`
        text = SUBJECT_OF_MESSAGE.sub("", DETAIL_OF_MESSAGE.sub("", text))
    found = re.findall(r"[;:](?=\s|$)", text)
    return " and ".join(found) if len(found) > 1 else None


LABEL = re.compile(r"What(?: [\w-]+){1,4}:(?=\s|$)")  # "What it does:" is a heading within a paragraph
SUBJECT = re.compile(r"(?:[*(\"]*)((?:What|Who|Whoever|Whose|Whom)\b(?! to \w)|Of\b(?! course))", re.IGNORECASE)


def _relative_subject(sentence: Sentence) -> str | None:
    if sentence.kind == "heading" or sentence.plain.rstrip(")*").endswith("?") or LABEL.match(sentence.plain):
        return None
    match = SUBJECT.match(sentence.plain)
    # A fragment such as "# of the launch", behind a line of code, has no subject.
    return match[1] if match and match[1] != "of" else None


TEXTS = (
    "message|messages|line|lines|warning|warnings|error|errors|sentence|word|words|readme|page|pages|docstring|comment|"
    "text|texts|table|help|adr|adrs|section|note|heading|documentation|docs|specification|rfc|paper|manual|name|names|"
    rf"{FILE}|{DOCUMENT.pattern}|title|label|record|records|handle|handles|outcome|outcomes|answer|response|header|"
    "file|annotation|annotations|signature|log|reason|"
    "user|users|author|caller"
)
SAYS = re.compile(
    rf"(?<![\w.])((?!(?:{TEXTS}|i|you|they|we|who)\b)[\w'’./]+) (?:that |which |also |then |only )?(says?|said)\b"
)


def _program_says(sentence: Sentence) -> str | None:
    if "sa" not in sentence.lower:
        return None
    for match in SAYS.finditer(sentence.lower):
        before = [*sentence.lower[: match.start()].split()[-1:], match[1]]
        is_a_text = any(re.fullmatch(TEXTS, word.strip("(,.;:")) for word in before)
        is_a_verb = match[2] != "say" or match[1] in ("processes", "programs", "commands", "replicas", "services")
        if is_a_verb and not is_a_text and match[1] not in ("is", "be", "not", "to"):
            return match[0]
    return None


BRITISH = (
    r"(?:synchron|initial|normal|optim|recogn|serial|parametr|parameter|material|organ|minim|maxim|general|special|"
    r"final|author|custom|util|categor|emphas|summar|visual|stabil|token|vector|quant|random|capital|local|neutral|"
    r"equal|penal|real|apolog|character|central|formal|memor|priorit|standard|symbol|canonical|ind|pulver|modular|"
    r"anonym|hypothes|monopol|public|legal|linear|regular)is(?:e|es|ed|er|ers|ing|ation|ations)\b"
)
BRITISH_WORDS = (
    r"behaviours?|colou?red(?<!colored)|colours?|colouring|favour\w*|honour\w*|neighbour\w*|harbour\w*|labour\w*|"
    r"rumours?|flavours?|centres?|centred|fibres?|metres?|theatres?|litres?|catalogues?|licences?|defences?|offences?|whilst|amongst|grey|greyed|"
    r"analyse[sd]?|analysing|paralyse[sd]?|programmes?|judgements?|artefacts?|learnt|spelt|burnt|labelled|labelling|"
    r"modelled|modelling|travelled|travelling|signalled|signalling|totalled|levelled|fulfils|fulfilment|enrolment|"
    r"instalment|skilful|ageing|cheques?|plough|sceptical|mould|tyres?|cosy|pretence|practis(?:e|ed|ing)"
)
COMPARATIVE = (
    r"longer|more|less|fewer|later|earlier|larger|smaller|older|newer|better|worse|slower|faster|higher|lower|"
    r"greater|bigger|doubt|good|different|wider|cheaper|shorter|use"
)
NEVER_PEOPLE = r"nobody|somebody|whoever|anybody|everybody"

SENTENCE_RULES: tuple[Rule, ...] = (
    Rule("long sentence", _too_long, f"a sentence has at most {MAX_WORDS} words: write two"),
    Rule("colons", _two_colons, "a sentence has at most one colon or semicolon: write two"),
    Rule("subject", _relative_subject, "name the thing: a sentence does not begin with What, Who, Whoever or Of"),
    pattern(
        "that of",
        r"\b(?:that|those) of (?:the|a|an|its|their|one|each|all|other|another|some|this|these|those|our|your)\b",
        "write the noun: the launch's …, the run's …",
    ),
    pattern("to be had", r"\b(?:to|not|cannot|can|could|may|might) be had\b", "write: is (not) available"),
    pattern(
        "is no X",
        rf"(?<!there )\b(?:is|are|was|were) no (?!(?:{COMPARATIVE})\b)(?=[a-z])\w+",
        "write: is not a …",
    ),
    pattern("told", r"\btold\b|\b(?:is|are|was|were) to say\b", "write: is given, is set, reports, prints"),
    Rule("says", _program_says, "programs report, print, show or name; texts and people say"),
    pattern(
        "stands",
        r"(?<!-)\b(?:stands|stood)\b(?! (?:for|by|in for|alone|out|ready|still)\b)|\bas (?:it|they) stands?\b",
        "write: is, is written, exists",
    ),
    pattern("fares", r"\b(?:fares?|fared|faring)\b(?! well)", "write: continues, ends, behaves"),
    pattern(
        "goes on",
        r"\b(?:go|goes|went|gone|going) on\b(?! (?:the|a|an|its|their|to)\b)",
        "write: continues, happens",
    ),
    pattern(
        "is over",
        r"\b(?:is|are|was|were|be|been) over\b(?=[.,;:)]|$| and| or| when| if| before| after| at once| for)",
        "write: has ended",
    ),
    pattern("let go", r"\b(?:lets?|letting) (?:\w+ ){0,2}go\b", "write: detached, released"),
    pattern("anew", r"\banew\b", "write: again"),
    pattern(
        "as many",
        r"(?<!twice )(?<!half )(?<!times )\bas many\b(?!.*\bas\b)|\bso many\b(?!.*\b(?:that|as)\b)",
        "write: N, the same number of",
    ),
    pattern(
        "nobody",
        rf"\b(?:{NEVER_PEOPLE})\b|\ba person\b(?! who)",
        "write: the user, another process, any process, no process",
    ),
    pattern("wire", r"\bwhat a wire leaves\b", "write: the rounding error"),
    pattern(
        "have done",
        r"\b(?:have|has|had|having) (?:it|them|all|each|one|\w+thing|(?:an?|the) \w+(?: \w+)?(?<! is)(?<! are)) done\b",
        "write: do X",
    ),
    pattern("is to be", r"\b(?:is|are|was|were) (?:not )?to be\b(?! \w+ (?:a|an) )", "write: must be, will be"),
    pattern("beside", r"\bbeside (?:the |its |their )?training\b", "write: while training continues"),
    pattern("unlike", r"\bunlike (?:speeds|numbers|lengths|sizes|shares|machines)\b", "write: different speeds"),
    pattern("belongs into", r"\bbelongs? into\b|\bleave it away\b|\bleft away\b", "write: belongs in, remove it"),
    pattern(
        "contraction",
        r"\b(?:\w+n['’]t|(?:it|that|there|let|he|she|what|who|here)['’]s|(?:i|you|we|they|who)['’](?:re|ve|ll|d|m))\b",
        "write both words",
    ),
    pattern("exclamation mark", r"\w!(?=[\s\"')]|$)", "write a full stop"),
    pattern("British spelling", rf"\b(?:{BRITISH}|(?:{BRITISH_WORDS})\b)", "use the American spelling"),
)

DEFINED_BY_ANOTHER = re.compile(
    r"the same\b(?! (?:as before|for)\b)|same as\b|likewise\b|ditto\b|"
    r"as (?:for|in|of|with) [\w.]+(?:\(.*\))?[.,;]?$|see [\w.]+$",
    re.IGNORECASE,
)


def check_sentence(sentence: Sentence) -> Iterator[tuple[str, str]]:
    """Yield the name and the advice of each rule that a sentence breaks."""
    for rule in SENTENCE_RULES:
        found = rule.find(sentence)
        if found is not None:
            yield rule.name, f"{found!r}: {rule.advice}"
    if sentence.kind == "argument" and (match := DEFINED_BY_ANOTHER.match(sentence.plain)):
        yield "defined by another", f"{match[0]!r}: describe the parameter itself"


# ----------------------------------------------------------------------------------------------- names

BANNED_NOUNS = frozenset({
    "what", "who", "somebody", "told", "had", "stands", "hands", "sight", "answers", "liaison", "fleet", "fleets",
    "recipe", "recipes", "spread", "terms", "site", "sites",
})  # fmt: skip
OLD_NAMES: Mapping[str, str] = {
    "Liaison": "ReplicaLink", "Observer": "RunStateReader", "Traces": "Run", "RestartStates": "RestartView",
    "Hands": "AttemptStarter", "Patience": "OutageTolerance", "PatientStore": "RetryingStore",
    "LaunchHands": "LaunchStarter", "hands_of_spare": "spare_starter", "Standstills": "StalenessTracker",
    "Terms": "RestartContext", "JobEnds": "JobOutcomeRecorder", "JobStates": "JobStatePoller",
    "Keeper": "RestartController", "OutsideKeeper": "ExternalController", "Unfinished": "PendingReplica",
    "Parent": "SupervisorStatus", "Answers": "RestartSession", "ServiceWord": "ServiceReason",
    "note_why": "record_service_reason", "Site": "PlacedBackend", "Fleet": "Placements", "NativeExecutor": "Backend",
    "SpreadExecutor": "Placements", "as_one": "Placements", "half_way": "launch_failed_message", "Recipe": "StartSpec",
    "Ends": "ExitClassifier", "EndRecords": "OutcomeWriter", "vouched_task": "trusted_task",
    "is_overtaken": "is_fenced", "barred_by": "blocking_order", "is_barred": "is_blocked",
    "CancelLooks": "CancelPoller", "words_of_bar": "stop_reason", "Ranks": "ProcessStarter",
    "Running": "RunningAttempt", "leave_behind": "give_up_process", "Participant": "TrainingSide",
    "Rounds": "RoundRunner", "Turns": "Scheduler", "InTurn": "Inline", "Cursor": "LogReplayer", "Send": "PendingWork",
    "Landing": "RoundResult", "Settlement": "StepAccount", "Shadow": "HeldWork", "Room": "BufferPool",
    "Lost": "WireError", "lone_s": "unobserved_wait_s", "insist_on_seal": "read_seal_or_none", "Look": "Look",
    "Earlier": "RestartTally", "is_hopeless": "is_permanent", "begun_by": "started_by", "total_of": "total_replicas",
}  # fmt: skip
"""The old names of classes and functions that mean one thing, with their new ones."""
OLD_NAMES_IN: Mapping[tuple[str, str], str] = {
    # The folder and the old name, and the new name.
    ("diloco/rendezvous/", "meet"): "run_round", ("diloco/rendezvous/", "present"): "contribute_early",
    ("diloco/rendezvous/", "apart"): "run_in_round_thread", ("diloco/rendezvous/", "settle"): "resolve_work",
    ("diloco/rendezvous/", "place"): "location", ("diloco/rendezvous/", "Place"): "RunLocation",
    ("diloco/", "land"): "prepare_merge", ("diloco/rendezvous/", "_lands"): "merge_ready",
    ("diloco/rendezvous/", "_take"): "deliver", ("executors/logs/", "Sight"): "LogPosition",
    ("executors/supervision/", "Sight"): "RunSnapshot", ("executors/run/", "bars"): "blocks",
    ("executors/worker/", "bars"): "blocks", ("executors/attempt/", "named_by"): "from_handle",
    ("executors/attempt/", "own"): "rebind_handle", ("executors/attempt/", "begin"): "create_intent",
    ("executors/run/", "settle"): "claim_run_folder", ("executors/launcher/", "parts_of"): "parse_backends",
    ("executors/cli/", "tell"): "on_progress", ("executors/worker/", "tell"): "on_progress",
    ("executors/cli/", "say"): "warn", ("executors/run/", "say"): "warn",
    ("executors/run/", "_Away"): "UnreachableStore",
    ("executors/", "places"): "max_parallel", ("executors/worker/", "Finding"): "WatchdogReport",
}  # fmt: skip
"""The old names that mean another thing elsewhere, with the folder in which they are old."""
OLD_FILES: Mapping[str, str] = {
    "liaison.py": "replica_link.py", "recipe.py": "start_spec.py", "ends.py": "exit_classifier.py",
    "limits.py": "watchdog.py", "rounds_apart.py": "round_runner.py", "happened.py": "events.py",
    "keep.py": "watch.py", "planned.py": "plan_check.py", "in_short.py": "summary.py", "words.py": "text.py",
}  # fmt: skip


def words_of_name(name: str) -> list[str]:
    """Return the words of an identifier, in lower case: `LaunchHands` is launch, hands."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def check_file_name(path: str) -> Iterator[Finding]:
    """Yield what is wrong with the name of a Python file."""
    name = path.rpartition("/")[2]
    if name in OLD_FILES:
        yield Finding(path, 1, "old name", name, f"rename it to {OLD_FILES[name]}")
    elif banned := BANNED_NOUNS & {*words_of_name(name.removesuffix(".py"))}:
        yield Finding(path, 1, "banned noun", name, f"{', '.join(banned)}: name the file by the standard term")


def nodes_of(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Return the nodes of a file without the parts of f-strings. `ast.walk` takes twice the time."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        found.append(node)
        if isinstance(node, ast.Name | ast.Constant | ast.JoinedStr):
            continue
        for name in node._fields:
            value = getattr(node, name)
            if value.__class__ is list:
                waiting += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                waiting.append(value)
    return tuple(found)


def check_names(path: str, nodes: Iterable[ast.AST]) -> Iterator[Finding]:
    """Yield what is wrong with the names of the classes and functions of a file."""
    for node in nodes:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        here = {old: new for (folder, old), new in OLD_NAMES_IN.items() if path.startswith(folder)}
        new = OLD_NAMES.get(node.name) or here.get(node.name)
        if new is not None:
            yield Finding(path, node.lineno, "old name", node.name, f"rename it to {new}")
        elif isinstance(node, ast.ClassDef) and (banned := BANNED_NOUNS & {*words_of_name(node.name)}):
            advice = f"{', '.join(banned)}: name the class by the standard term"
            yield Finding(path, node.lineno, "banned noun", node.name, advice)


# --------------------------------------------------------------------------------- the texts of a file


SECTION = re.compile(
    r"(Args|Arguments|Attributes|Raises|Returns|Yields|Examples?|Notes?|Warns|References|Keys|Sources?):"
    r"(?: [A-Z][a-z ]+)?$"
)
ENTRY = re.compile(r"\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*(?: \([^)]*\))?:(?:\s+|$)")
INLINE_SECTION = re.compile(r"Raises: [\w., ]+: ")
DIRECTIVE = re.compile(r":::|:[a-z-]+:|% ")
"""A line of a directive, an option of one, or a comment, in the Markdown of the site."""
ITEM = re.compile(r"(?:[-*•]|\d+[.)])\s+")


def rows_of_docstring(text: str) -> list[str]:
    """Return the lines of a docstring, without the margin of its code."""
    first, *rows = text.expandtabs().split("\n")
    margins = [len(row) - len(row.lstrip()) for row in rows if row.strip()]
    if (
        rows and not rows[-1].strip()
    ):  # the closing quotes: if all other lines are an example, only they show the margin
        margins.append(len(rows[-1]))
    margin = min(margins, default=0)
    return [first.strip(), *(row[margin:].rstrip() for row in rows)]


def blocks_of_docstring(text: str, line: int) -> Iterator[Block]:
    """Yield the paragraphs and the entries of a docstring, without its examples.

    Args:
        text: The docstring, as it is in the file.
        line: The number of its first line.
    """
    rows = rows_of_docstring(text)
    kind, section, is_code = "docstring", "", False
    found: list[str] = []
    start = line

    def close() -> Iterator[Block]:
        if found:
            yield Block(kind, start, " ".join(found), start + len(found) - 1)
        found.clear()

    before = ""
    for number, row in enumerate(rows, start=line):
        indent, content = len(row) - len(row.lstrip()), row.strip()
        base = 4 if section else 0
        if not content:
            yield from close()
            before = row
            continue
        if match := SECTION.match(row):
            yield from close()
            section, kind, is_code = match[1], "docstring", False
            before = row
            continue
        if section and indent == 0:
            yield from close()
            section, kind, base = "", "docstring", 0
        if section.startswith("Example") or content.startswith((">>>", "```")):
            before = row
            continue
        # Text that is indented deeper, behind an empty line or a colon, is code or a drawing.
        deeper = indent >= base + 4 and (
            is_code or not before.strip() or (before.rstrip().endswith(":") and not found[1:2])
        )
        is_entry = section in ("Args", "Arguments", "Attributes", "Raises", "Keys", "Warns") and indent == 4
        if deeper and not is_entry and not (section and found):
            yield from close()
            is_code = True
            before = row
            continue
        is_code = False
        if is_entry and (entry := ENTRY.match(content)):
            yield from close()
            kind = "argument" if section in ("Args", "Arguments") else "docstring"
            content = content[entry.end() :]
        elif item := ITEM.match(content) or INLINE_SECTION.match(content):
            yield from close()
            content = content[item.end() :]
        elif re.search(r"\S {3,}\S", content):  # a row of a table
            yield from close()
            before = row
            continue
        if not found:
            start = number
        found.append(content)
        before = row
    yield from close()


COMMENT_OF_TOOL = re.compile(r"(?:noqa|type:|pragma|fmt:|ruff:|mypy:|!|-\*-|/// )")


def blocks_of_comments(source: str, strings: list[tuple[int, int, int, int]]) -> Iterator[Block]:
    """Yield the comments of a file; neighboring lines are one comment.

    Args:
        source: The text of the file.
        strings: The first line and column, and the last line and column, of each string. A `#` in a string does not
            begin a comment.
    """
    inside: set[int] = set()
    by_line: dict[int, list[tuple[int, int]]] = {}
    for first, column, last, last_column in strings:
        if last > first:
            inside.update(range(first + 1, last))
            by_line.setdefault(first, []).append((column, 1 << 30))
            by_line.setdefault(last, []).append((0, last_column))
        else:
            by_line.setdefault(first, []).append((column, last_column))
    found: list[str] = []
    start = last_line = 0
    for number, row in enumerate(source.encode().split(b"\n"), start=1):  # the parser counts columns in bytes
        position = row.find(b"#")
        if position < 0 or number in inside:
            continue
        spans = by_line.get(number, ())
        while position >= 0 and any(a <= position < b for a, b in spans):
            position = row.find(b"#", position + 1)
        if position < 0:
            continue
        text = row[position:].decode().lstrip("#").strip()
        if COMMENT_OF_TOOL.match(text):
            _, dash, text = text.partition(" - ")
            if not dash:
                continue
        alone = not row[:position].strip()
        if found and not (alone and last_line == number - 1):
            yield Block("comment", start, " ".join(found), last_line)
            found = []
        if not found:
            start = number
        found.append(text)
        last_line = number if alone else 0
    if found:
        yield Block("comment", start, " ".join(found), start)


def _text_of(node: ast.AST) -> str | None:
    """Return the text of a string or an f-string, with `VALUE` for each value in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
    return None


def is_prose(text: str) -> bool:
    """Return True if a string is a sentence for readers, and not code, a pattern, a path or a record."""
    words = text.split()
    if len(words) < 4 or (len(words) > 12 and not re.search(r"[.,:;]", text)):
        return False
    if re.search(r"\n\s*(?:def|import|from|class|with|for|if|return)\b|[{}\\^]|^\s*[<\[#]", text):
        return False
    plain = [word for word in words if re.fullmatch(r"[\"'(]*[A-Za-z][a-z]*(?:[-'’][a-z]+)*[\"').,;:?!]*", word)]
    return len(plain) >= 0.6 * len(words) and any(word.islower() for word in plain)


def blocks_of_python(source: str, nodes: Iterable[ast.AST], *, with_strings: bool = True) -> Iterator[Block]:
    """Yield the docstrings, the comments and the messages of a Python file.

    Args:
        source: The text of the file.
        nodes: The nodes of the parsed file.
        with_strings: False to leave out the messages, for a stand-in that repeats the messages of a service.
    """
    spans: list[tuple[int, int, int, int]] = []
    done: set[ast.AST] = set()
    for node in nodes:
        if (
            isinstance(node, ast.Expr) and (text := _text_of(node.value)) is not None
        ):  # also behind fields and constants
            done.add(node.value)
            yield from blocks_of_docstring(text, node.lineno)
        if isinstance(node, ast.Constant | ast.JoinedStr) and (text := _text_of(node)) is not None:
            spans.append((node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0))
            if with_strings and node not in done and is_prose(text):
                for paragraph in re.split(r"\n\s*\n|\n(?=[-*] )", text):
                    yield Block("string", node.lineno, paragraph, node.end_lineno or node.lineno)
    yield from blocks_of_comments(source, spans)


def blocks_of_page(source: str) -> Iterator[Block]:
    """Yield the paragraphs, items, headings and cells of a Markdown page, without its code."""
    found: list[str] = []
    start, is_code = 0, False

    def close(kind: str = "page") -> Iterator[Block]:
        if found:
            yield Block(kind, start, " ".join(found), start + len(found) - 1)
        found.clear()

    for number, row in enumerate(source.split("\n"), start=1):
        content = row.strip()
        if content.startswith("```"):
            yield from close()
            is_code = not is_code
        elif is_code or (row.startswith("    ") and not found):
            continue
        elif not content or DIRECTIVE.match(content):
            yield from close()
        elif content.startswith("#"):
            yield from close()
            yield Block("heading", number, re.sub(r"^#+ (?:\d{4}: )?", "", content), number)
        elif content.startswith("|"):
            yield from close()
            for cell in content.strip("|").replace("\\|", "/").split(" | "):
                if not re.fullmatch(r"[-:| ]*", cell):
                    yield Block("heading" if SUBJECT.match(cell.strip()) else "page", number, cell.strip(), number)
        else:
            if item := ITEM.match(content):
                yield from close()
                content = content[item.end() :]
            if not found:
                start = number
            found.append(content)
    yield from close()


@cache
def help_texts() -> tuple[tuple[str, str], ...]:
    """Return the help texts of the command, each with the verb and the option that it belongs to."""
    from executors.cli import command_of

    command = command_of()
    found = [("replicas", command.help or "")]
    for verb, each in command.commands.items():
        found.append((f"replicas {verb}", each.help or ""))
        for option in each.params:
            names = getattr(option, "opts", None) or [option.name]
            found.append((f"replicas {verb} {names[0]}", getattr(option, "help", None) or ""))
    return tuple((f"help of `{name}`", text) for name, text in found if text)


# ---------------------------------------------------------------------------------------- public names


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _file_of(module: str) -> Path | None:
    for candidate in (
        ROOT.joinpath(*module.split(".")) / "__init__.py",
        ROOT.joinpath(*module.split(".")).with_suffix(".py"),
    ):
        if candidate.is_file():
            return candidate
    return None


def _resolve(module: str, name: str) -> tuple[Path, ast.ClassDef | ast.FunctionDef] | None:
    """Return the file and the definition of a name, which a module may only import."""
    path = _file_of(module)
    if path is None:
        return None
    for node in nodes_of(tree_of(path)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name and node.col_offset == 0:
            return path, node
    for node in nodes_of(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                if name == (each.asname or each.name):
                    return _resolve(node.module, each.name)
    return None


def _all_of(module: str) -> list[str]:
    path = _file_of(module)
    assert path is not None, module
    for node in tree_of(path).body:
        if isinstance(node, ast.Assign) and "__all__" in [ast.unparse(each) for each in node.targets]:
            return list(ast.literal_eval(node.value))
    definitions = [node for node in tree_of(path).body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return [node.name for node in definitions if not node.name.startswith("_")]


@cache
def public_definitions() -> tuple[tuple[Path, ast.ClassDef | ast.FunctionDef], ...]:
    """Return the classes and functions that users may name, each with its file."""
    found = [_resolve(module, name) for module in PUBLIC for name in _all_of(module)]
    return tuple({id(each[1]): each for each in found if each is not None}.values())


def parameters_of(node: ast.FunctionDef) -> list[str]:
    """Return the names of the parameters that a docstring must describe."""
    arguments = node.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    names += [each.arg for each in (arguments.vararg, arguments.kwarg) if each is not None]
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def described_in(docstring: str) -> set[str]:
    """Return the parameters that the `Args` of a docstring describe."""
    # A long list of parameters is in several sections with titles, such as "Args: Slow links".
    head = r"^ *(?:Args|Arguments|Attributes):(?: [A-Z][a-z ]+)?\n((?:[ \t]+\S.*\n?|\s*\n)+)"
    sections = "\n".join(re.findall(head, docstring, re.MULTILINE))
    entries = re.findall(r"^[ \t]*(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \([^)]*\))?:", sections, re.MULTILINE)
    return {name.strip(" *") for entry in entries for name in entry.split(",")}


def has_example(docstring: str) -> bool:
    """Return True if a docstring has an example: a section, a prompt, a fence, or an indented block."""
    rows = rows_of_docstring(docstring)
    is_block = any(not before and row.startswith("    ") for before, row in pairwise(rows))
    return bool(re.search(r"^\s*Examples?:|>>> |```", docstring, re.MULTILINE)) or is_block


def _has_no_args_of_its_own(node: ast.FunctionDef) -> bool:
    """Return True for tests, fixtures, and an `__init__` that takes the fields of another class."""
    decorators = [ast.unparse(each) for each in node.decorator_list]
    return node.name.startswith("test_") or any("fixture" in each or "options_of" in each for each in decorators)


def _needs_example(method: ast.FunctionDef) -> bool:
    """Return True for a method that users call: not for `__init__`, a property, or a method of a protocol."""
    decorators = [ast.unparse(each) for each in method.decorator_list]
    is_property = any(each.endswith(("property", ".setter")) for each in decorators)
    return method.name != "__init__" and not is_property and not _described_by_protocols(method.name)


PROTOCOLS = (
    ("executors.protocol", "ServerlessExecutor"),
    ("executors.store", "Store"),
    ("executors.backend", "Backend"),
)


@cache
def _described_by_protocols(method: str) -> set[str]:
    """Return the parameters that a protocol describes for the classes that have its methods."""
    found: set[str] = set()
    for module, name in PROTOCOLS:
        resolved = _resolve(module, name)
        for each in resolved[1].body if resolved is not None else ():
            if isinstance(each, ast.FunctionDef) and each.name == method:
                found |= described_in(ast.get_docstring(each, clean=False) or "")
    return found


def check_public(path: str, node: ast.ClassDef | ast.FunctionDef) -> Iterator[Finding]:
    """Yield the parameters without a description, and the missing example, of a public class or function."""
    docstring = ast.get_docstring(node, clean=False) or ""
    if not has_example(docstring):
        yield Finding(path, node.lineno, "no example", node.name, "add a short example to the docstring")
    functions = (
        [node]
        if isinstance(node, ast.FunctionDef)
        else [each for each in node.body if isinstance(each, ast.FunctionDef)]
    )
    for function in functions:
        is_init = function.name == "__init__"
        if (function.name.startswith("_") and not is_init) or _has_no_args_of_its_own(function):
            continue
        text = ast.get_docstring(function, clean=False) or ""
        if not text and not is_init:
            continue  # it is a verb of a protocol, which describes it
        described = described_in(text) | (
            described_in(docstring) if is_init else _described_by_protocols(function.name)
        )
        owner = "" if function is node else f"{node.name}."
        is_method = function is not node and _needs_example(function)
        # The example of the class may call the method: one example of several calls is often the clearest.
        if is_method and not has_example(text) and not re.search(rf"\.{function.name}\(", docstring):
            advice = "add a short example to the docstring, or call the method in the example of the class"
            yield Finding(path, function.lineno, "no example", f"{owner}{function.name}", advice)
        for name in parameters_of(function):
            if name not in described:
                text = f"{owner}{function.name}({name})"
                yield Finding(path, function.lineno, "no Args", text, "describe the parameter in Args")


# ------------------------------------------------------------------------------- one meaning of a name


PACKAGES = ("executors", "diloco")
SAME_MEANING: Mapping[str, str] = {
    "main": "the function that runs a program",
    "DiLoCoCallback": "the callback of each trainer library",
    "Tracker": "the tracker of each service, and their protocol",
}
"""Names that several files define with one meaning, and this meaning."""
OF_ANOTHER_SYSTEM = "executors/process/macos.py"
"""It defines each name of `executors/process/linux.py` with the same meaning, for another system."""


def homonyms_of(definitions: Iterable[tuple[str, int, str]]) -> dict[str, list[tuple[str, int]]]:
    """Return the names that several files define, with the places of each.

    A verb of the command may have the name of the function that it calls, so files of `executors/cli` are not counted.

    Args:
        definitions: the public classes and functions of modules: path, line and name.
    """
    places: dict[str, list[tuple[str, int]]] = {}
    for path, line, name in definitions:
        if not path.startswith("executors/cli/") and path != OF_ANOTHER_SYSTEM and name not in SAME_MEANING:
            places.setdefault(name, []).append((path, line))
    return {name: found for name, found in places.items() if len({path for path, _ in found}) > 1}


@cache
def homonyms() -> Mapping[str, list[tuple[str, int]]]:
    """Return the homonyms of `executors` and `diloco`."""
    found = []
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                found.append((path.relative_to(ROOT).as_posix(), node.lineno, node.name))
    return homonyms_of(found)


def check_homonyms(path: str) -> Iterator[Finding]:
    """Yield the names in a file that another file defines, too."""
    for name, places in homonyms().items():
        others = sorted({other for other, _ in places if other != path})
        for line in (line for other, line in places if other == path):
            yield Finding(path, line, "two meanings", name, f"also in {', '.join(others)}: a name has one meaning")


# ----------------------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class FileReport:
    """The findings in a file, and the length of its sentences.

    Attributes:
        findings: The findings, in the order of the lines.
        sentences: The number of sentences.
        words: The number of words in these sentences.
    """

    findings: tuple[Finding, ...]
    sentences: int = 0
    words: int = 0


def report_of_blocks(path: str, blocks: Iterable[Block]) -> FileReport:
    """Return the findings in blocks of text.

    Args:
        path: The file that the blocks are from.
        blocks: The blocks.
    """
    findings: list[Finding] = []
    n = words = 0
    for block in blocks:
        for sentence in sentences_of(block):
            if sentence.words > 2:
                n, words = n + 1, words + sentence.words
            findings += [
                Finding(path, sentence.line, rule, sentence.text, advice) for rule, advice in check_sentence(sentence)
            ]
    return FileReport(tuple(findings), n, words)


def report_of(path: str) -> FileReport:
    """Return the findings in one file.

    Args:
        path: A Python file or a page, relative to the root of the repository.
    """
    source = (ROOT / path).read_text(encoding="utf-8")
    if not path.endswith(".py"):
        return report_of_blocks(path, blocks_of_page(source))
    nodes = nodes_of(ast.parse(source))
    report = report_of_blocks(path, blocks_of_python(source, nodes, with_strings=not path.startswith("tests/servers")))
    findings = [*report.findings, *check_file_name(path), *check_names(path, nodes)]
    for where, node in public_definitions():
        if where == ROOT / path:
            findings += check_public(path, node)
    if path.startswith(tuple(f"{package}/" for package in PACKAGES)):
        findings += check_homonyms(path)
    return FileReport(tuple(sorted(findings, key=lambda each: each.line)), report.sentences, report.words)


def files_with_ceilings() -> list[str]:
    """Return the files whose number of findings may only fall, in order."""
    paths = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    paths += [path for each in PAGES for path in ROOT.glob(each)]
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def perfect_pages() -> list[str]:
    """Return the pages that must have no finding. A generated page shows texts of the code, which are read there."""
    paths = {str(path.relative_to(ROOT)) for each in PERFECT_PAGES for path in ROOT.glob(each)}
    built = {path for path in paths if path.startswith("docs/_build/")}
    return sorted(paths - built - {f"docs/{page}" for page in PAGES_FROM_CODE})


@cache
def reports() -> Mapping[str, FileReport]:
    """Return the report of each file that has a ceiling."""
    gc.disable()  # the collector takes half the time of parsing, and finds nothing
    try:
        return {path: report_of(path) for path in files_with_ceilings()}
    finally:
        gc.enable()


# -------------------------------------------------------------------------------------------- ceilings


def read_ceilings(text: str) -> dict[str, int]:
    """Return the ceilings by path. If a merge has left two lines of a file, the lower number counts.

    Args:
        text: The content of `language_ceilings.json`, also with the marks of a merge in it.
    """
    found: dict[str, int] = {}
    for path, number in re.findall(r'^\s*"([^"]+)": (\d+),?$', text, flags=re.MULTILINE):
        found[path] = min(int(number), found.get(path, int(number)))
    return found


def write_ceilings(ceilings: Mapping[str, int]) -> str:
    """Return the ceilings as JSON: sorted, one line per file, without the files that have none left."""
    return json.dumps({path: n for path, n in sorted(ceilings.items()) if n}, indent=1) + "\n"


def compare(ceilings: Mapping[str, int], counts: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """Return the files that have too many findings, and the entries that must be lowered.

    Args:
        ceilings: The allowed number of findings of each file. A file without an entry may have none.
        counts: The number of findings of each file.
    """
    over = [path for path, n in counts.items() if n > ceilings.get(path, 0)]
    under = [path for path, ceiling in ceilings.items() if counts.get(path, 0) < ceiling]
    return over, under


def lowered(ceilings: Mapping[str, int], counts: Mapping[str, int]) -> dict[str, int]:
    """Return the ceilings after they were lowered. None is raised.

    Args:
        ceilings: The ceilings before.
        counts: The number of findings of each file.
    """
    return {path: min(ceiling, counts.get(path, 0)) for path, ceiling in ceilings.items()}


# --------------------------------------------------------------------------------------------- command


def _print_summary() -> None:
    by_folder: Counter[str] = Counter()
    by_file = Counter({path: len(report.findings) for path, report in reports().items() if report.findings})
    by_rule: Counter[str] = Counter()
    for path, report in reports().items():
        by_folder["/".join(path.split("/")[:2]) if "/" in path else path] += len(report.findings)
        by_rule.update(each.rule for each in report.findings)
    for counts in (by_folder, by_file, by_rule):
        for name, n in counts.most_common():
            print(f"{n:6} {name}")
        print()
    print(f"{by_rule.total():6} in all")
    pages = {path: report_of(path) for path in perfect_pages()}
    averages = {path: each.words / each.sentences for path, each in {**reports(), **pages}.items() if each.sentences}
    long = sorted(((average, path) for path, average in averages.items() if average > GOOD_AVERAGE), reverse=True)
    print(f"\n{len(long)} files have more than {GOOD_AVERAGE} words per sentence on average:")
    for average, path in long[:20]:
        print(f"{average:6.1f} {path}")


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code.

    Args:
        arguments: The arguments of the command, without its name.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.docs.language")
    parser.add_argument("paths", nargs="*", help="Files or folders of which to show every finding.")
    parser.add_argument(
        "--lower", action="store_true", help="Lower the ceilings of files that have fewer findings now."
    )
    parser.add_argument("--move", nargs=2, metavar=("OLD", "NEW"), help="Give a file's ceiling to its new path.")
    given = parser.parse_args(arguments)
    ceilings = read_ceilings(CEILINGS.read_text(encoding="utf-8"))
    if given.move:
        old, new = given.move
        ceilings[new] = ceilings.get(new, 0) + ceilings.pop(old, 0)
        CEILINGS.write_text(write_ceilings(ceilings), encoding="utf-8")
    elif given.lower:
        counts = {path: len(report.findings) for path, report in reports().items()}
        CEILINGS.write_text(write_ceilings(lowered(ceilings, counts)), encoding="utf-8")
        over, _ = compare(ceilings, counts)
        for path in over:
            print(f"{path} has {counts[path]} findings, and its ceiling is {ceilings.get(path, 0)}.", file=sys.stderr)
        return 1 if over else 0
    elif given.paths:
        for path in (*perfect_pages(), *files_with_ceilings()):
            if any(path == each.rstrip("/") or path.startswith(f"{each.rstrip('/')}/") for each in given.paths):
                print(*report_of(path).findings, sep="\n", end="\n" if report_of(path).findings else "")
        if "help" in given.paths:
            for name, text in help_texts():
                print(*report_of_blocks(name, [Block("help", 0, text)]).findings, sep="\n", end="")
    else:
        _print_summary()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
