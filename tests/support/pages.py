"""Reads the code blocks of a documentation page, runs or checks each, and compares what they print.

A page is a Markdown file below `docs/`. Its blocks run in their order, in a folder of the page's own.

- A `{code-block}` with `:caption: train.py` becomes that file.
- `python` runs as a script. The next `text` block is its output.
- `console` runs each line after `$ ` in a shell. The lines below a command are its output.
- `:class: cloud`: the parser of the command checks each `replicas …` line, and nothing runs. If the run of the page has
  the variables of a service on loopback, its `replicas …` and `python …` lines run there, too.
- `:class: fragment`: the Python code compiles, and its keywords are parameters of the real functions.
- `:class: shape` is a drawing, or a form of output. Nothing is checked.

In an expected output, `…` stands for any text, a line of only `…` for any lines, and times and the names of runs for
any others. A comment `% files: tutorial/your-loop.md` gives a page the files of another page.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)(?P=fence) *$", re.M | re.S
)
OPTION = re.compile(r":(\w+): *(.*)\n")
FILES_OF = re.compile(r"^% files: (\S+)$", re.M)
FILE_LANGUAGES = ("python", "toml", "yaml", "json", "text")
DIRECTIVES = ("toctree", "literalinclude", "image", "figure", "note", "tip", "warning", "grid", "card", "tab-set")
RUN_NAME = r"[a-z]+-[a-z]+-[0-9a-f]{4}"
VARIABLE = re.compile(rf"(…| +|\[ *[\d.]+ (?:s|ms|min|h)\]|{RUN_NAME}|\d[\d.]*(?= (?:s|ms|min|h)\b))")
"""The parts of an expected output that may differ: omitted text, spaces, times, and the names of runs."""
TIMEOUT_S = 200
USAGE_ERROR: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "UsageError")
"""The error of the parser. Typer has its own copy of click, and exports the subclasses alone."""


@dataclass(frozen=True)
class Block:
    """A code block of a page.

    Attributes:
        language: The first word of its fence, or the language of a `{code-block}`.
        text: Its lines, without the options of a directive.
        line: The number of its fence's line.
        caption: The name of the file that it becomes, or an empty text.
        kind: Its `:class:`, or an empty text.
    """

    language: str
    text: str
    line: int
    caption: str = ""
    kind: str = ""


def blocks_of(page: str) -> Iterator[Block]:
    """Yield the code blocks of a page, in their order.

    Args:
        page: The Markdown text.

    Raises:
        ValueError: A block is of a kind that this module does not know.
    """
    for match in FENCE.finditer(page):
        line = page.count("\n", 0, match.start()) + 1
        info = match["info"].strip()
        indent = match["indent"]
        body = re.sub(rf"^{indent}", "", match["body"], flags=re.M) if indent else match["body"]
        options: dict[str, str] = {}
        if directive := re.fullmatch(r"\{([\w-]+)\} *(\S*)", info):
            if directive[1] != "code-block":
                if directive[1] not in DIRECTIVES:
                    raise ValueError(f"line {line}: there is no rule for the directive {directive[1]!r}")
                continue
            info = directive[2]
            while option := OPTION.match(body):
                options[option[1]] = option[2].strip()
                body = body[option.end() :]
        yield Block(info, body.strip("\n") + "\n", line, options.get("caption", ""), options.get("class", ""))


def pattern_of(expected: str) -> str:
    """Return a regular expression for an expected output."""
    lines = []
    for line in expected.rstrip("\n").split("\n"):
        if line.strip() == "…":
            lines.append(r"(?:.*\n)*?")
        else:
            parts = VARIABLE.split(line.rstrip())  # fixed and variable parts alternate
            texts = [re.escape(part) if index % 2 == 0 else _pattern_of_part(part) for index, part in enumerate(parts)]
            lines.append("".join(texts) + r" *\n")
    return "".join(lines)


def _pattern_of_part(part: str) -> str:
    if part == "…":
        return ".*"
    if not part.strip():
        return r"\s+"  # the width of a column depends on its content
    if part.startswith("["):
        return r"\[ *[\d.]+ (?:s|ms|min|h)\]"
    return r"[\d.]+" if part[0].isdigit() else RUN_NAME


def is_as_expected(printed: str, expected: str) -> bool:
    """Return True if the printed text is the expected output."""
    return re.fullmatch(pattern_of(expected), printed.rstrip("\n") + "\n") is not None


@dataclass
class PageRun:
    """Runs the blocks of one page.

    Attributes:
        path: The page.
        folder: The folder in which its files and commands are.
        home: The value of HOME.
        service: The variables that point commands at services on loopback. Blocks of the class `cloud` then run.
        lacks: Options of a `launch` that the service cannot serve, such as ` --gpu T4`. They are left out there.
    """

    path: Path
    folder: Path
    home: Path
    service: Mapping[str, str] = field(default_factory=dict)
    lacks: str = ""
    _printed: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.home.mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        """Run or check each block.

        Raises:
            AssertionError: A block fails, or prints something else than the page shows.
        """
        page = self.path.read_text(encoding="utf-8")
        for other in FILES_OF.findall(page):
            for block in blocks_of((DOCS / other).read_text(encoding="utf-8")):
                if block.caption:
                    self._write(block)
        for block in blocks_of(page):
            try:
                self._handle(block)
            except AssertionError as error:
                raise AssertionError(f"{self.path.relative_to(ROOT)}, line {block.line}: {error}") from None

    def _handle(self, block: Block) -> None:
        if block.caption:
            assert block.language in FILE_LANGUAGES, f"a file of the kind {block.language!r}"
            self._write(block)
        elif block.kind == "shape":
            pass
        elif block.kind == "fragment":
            check_fragment(block.text)
        elif block.kind == "cloud":
            for command, expected in commands_of(block.text):
                check_command(command)
                if self.service and command.startswith(("replicas ", "python ")):
                    is_plan = "--dry-run" in command
                    self._check_output(command if is_plan else command.replace(self.lacks, ""), expected)
        elif block.language == "python":
            script = self.folder / "script.py"
            script.write_text(block.text, encoding="utf-8")
            self._printed = self._call([sys.executable, "script.py"])
        elif block.language == "text":
            assert self._printed is not None, "a `text` block without a `python` block before it"
            assert is_as_expected(self._printed, block.text), (
                f"the page shows\n{block.text}\nit printed\n{self._printed}"
            )
            self._printed = None
        elif block.language == "console":
            for command, expected in commands_of(block.text):
                self._check_output(command, expected)
        else:
            raise AssertionError(f"there is no rule for a block of the kind {block.language!r}")

    def _check_output(self, command: str, expected: str) -> None:
        printed = self._call(["bash", "-c", command])
        if expected:
            assert is_as_expected(printed, expected), f"{command}\nthe page shows\n{expected}\nit printed\n{printed}"

    def _write(self, block: Block) -> None:
        path = self.folder / block.caption
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")

    def _call(self, command: list[str]) -> str:
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("REPLICA", "AWS_", "XDG_"))}
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={
                **kept,
                "HOME": str(self.home),
                "PATH": programs,
                "COLUMNS": "100",
                "OMP_NUM_THREADS": "1",
                **self.service,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{shlex.join(command)} ended with exit code {done.returncode}:\n{done.stdout}"
        return re.sub(r"(?m)^Preparing .* …\n", "", done.stdout)  # this line appears only on a slow machine


def commands_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block with its expected output.

    Raises:
        AssertionError: The block does not begin with a command.
    """
    assert text.startswith("$ "), "a console block begins with `$ `"
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        lines = part.split("\n")
        end = next(index for index, line in enumerate(lines) if not line.endswith("\\"))
        yield "\n".join(lines[: end + 1]), "\n".join(lines[end + 1 :]).strip("\n")


def check_command(line: str) -> None:
    """Check the verb and the options of a `replicas` line by the parser of the command. Other programs are not checked.

    Raises:
        AssertionError: The command would refuse the line.
    """
    from executors.cli import command_of

    for call in re.split(r"\s(?:&&|\|\|?|;)\s", line.replace("\\\n", " ")):
        words = shlex.split(re.sub(r"\s>\s*\S+", "", call), comments=True)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words.pop(0)
        if not words or words[0] != "replicas":
            continue
        if words[1] in {flag for option in command_of().params for flag in option.opts}:
            continue
        if words[1] == "launch" and "--" in words:  # the options of the script belong to the script
            words = words[: words.index("--")]
        command = command_of().commands.get(words[1])
        assert command is not None, f"replicas has no verb {words[1]!r}"
        try:
            command.make_context(words[1], words[2:], parent=typer.Context(command_of(), info_name="replicas"))
        except USAGE_ERROR as error:
            raise AssertionError(f"{call}: {error.format_message()}") from None


def check_fragment(text: str) -> None:
    """Compile a piece of Python, and check the keywords of its calls against the signatures of the real functions.

    Raises:
        AssertionError: It does not compile, or a function has no such parameter.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise AssertionError(f"{error.msg}: {error.text}") from None
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and (function := public_function(call.func)):
            accepted = inspect.signature(function).parameters
            takes_any = any(each.kind is each.VAR_KEYWORD for each in accepted.values())
            unknown = {word.arg for word in call.keywords if word.arg} - set(accepted)
            assert takes_any or not unknown, f"{ast.unparse(call.func)} has no parameter {sorted(unknown)}"


def public_function(called: ast.expr) -> Callable[..., Any] | None:
    """Return the public function that a call in a fragment is about, by the name of the function or of its object."""
    import diloco
    import executors
    from diloco.testing import run_replicas
    from executors.replica import Replica

    owners: Mapping[str, Any] = {"diloco": diloco.DiLoCo, "run": executors.Run, "replica": Replica}
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id in owners:
        found = getattr(owners[called.value.id], called.attr, None)
        assert found is not None, f"{called.value.id} has no {called.attr!r}"
        return found if callable(found) else None
    if isinstance(called, ast.Name):
        if called.id == "run_replicas":
            return run_replicas
        for package in (executors, diloco):
            if called.id in package.__all__:
                return getattr(package, called.id)  # type: ignore[no-any-return]
    return None
