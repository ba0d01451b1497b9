"""Tests how texts from the command line are converted by the entrypoint's annotations."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest

from executors.errors import EntrypointArgumentsError
from executors.task.arguments import annotations_in, annotations_of, from_texts, to_json
from executors.task.entrypoint import find_definition, signature_in

SOURCE = """
import enum, pathlib
from enum import auto
from pathlib import Path
from typing import Annotated, Literal, Optional
from somewhere import Elsewhere

Size = Literal["small", "large"]

class Mode(enum.Enum):
    FAST = "f"
    SLOW = "s"

class Level(enum.IntEnum):
    LOW = auto()
    HIGH = auto()

def main(  # type: ignore[no-untyped-def]
    on: bool = False, n: int = 1, lr: "float" = 0.1, name: str = "", out: pathlib.Path = None, size: Size = "small",
    depth: Literal[1, 2] = 1, mode: Mode = Mode.FAST, level: Level = Level.LOW, tag: Optional[str] = None,
    limit: int | None = None, either: str | int = 0, sizes: list[int] = (), paths: list[Path] = (),
    rate: Annotated[float, "per step"] = 0, plain=None, elsewhere: Elsewhere = None, table: dict = None,
    pair: tuple[int, float] = (), many: tuple[int, ...] = (), any: tuple = (),
): ...

def rest(**options: int): ...
"""


class Mode(enum.Enum):
    FAST = "f"
    SLOW = "s"


class Level(enum.IntEnum):
    LOW = enum.auto()
    HIGH = enum.auto()


def main(  # type: ignore[no-untyped-def]
    on: bool = False, n: int = 1, lr: float = 0.1, name: str = "", out: Path | None = None,
    size: Literal["small", "large"] = "small", depth: Literal[1, 2] = 1, mode: Mode = Mode.FAST,
    level: Level = Level.LOW, tag: Optional[str] = None, limit: int | None = None, either: str | int = 0,  # noqa: UP045
    sizes: list[int] = [], paths: list[Path] = [], rate: Annotated[float, "per step"] = 0, plain=None,  # noqa: B006
    elsewhere: Elsewhere = None, table: dict[str, Any] = {},  # type: ignore[name-defined] # noqa: B006, F821
    pair: tuple[int, float] = (0, 0), many: tuple[int, ...] = (), any: tuple = (),  # type: ignore[type-arg]
) -> None: ...  # fmt: skip


def rest(**options: int) -> None: ...


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "annotated.py"
    path.write_text(SOURCE)
    return path


def of_source(source: Path, function: str) -> dict[str, Any]:
    found = find_definition(f"{source}:{function}")
    assert found is not None
    taken = signature_in(*found)
    assert taken is not None
    return annotations_in(found[0], taken)


MEANT = [
    ("on", "no", False), ("on", "YES", True), ("on", "0", False), ("on", "1", True), ("on", "off", False),
    ("on", "True", True), ("n", "007", 7), ("n", "-3", -3), ("lr", ".5", 0.5), ("lr", "1e-3", 0.001), ("lr", "2", 2.0),
    ("name", "5", "5"), ("name", "true", "true"), ("out", "runs/1", Path("runs/1")), ("size", "large", "large"),
    ("depth", "2", 2), ("mode", "SLOW", Mode.SLOW), ("mode", "s", Mode.SLOW), ("level", "HIGH", Level.HIGH),
    ("level", "2", Level.HIGH), ("tag", "none", None), ("tag", "x", "x"), ("limit", "null", None), ("limit", "4", 4),
    ("either", "4", 4), ("either", "four", "four"), ("sizes", "[1, 2]", [1, 2]), ("sizes", "64,128", [64, 128]),
    ("sizes", "", []), ("paths", "a, b", [Path("a"), Path("b")]), ("rate", "3", 3.0), ("plain", "[1]", [1]),
    ("plain", "word", "word"), ("plain", "1e3", 1000.0), ("elsewhere", "5", 5), ("table", '{"a": 1}', {"a": 1}),
    ("pair", "1, 2", (1, 2.0)), ("pair", "[3, 4]", (3, 4.0)), ("many", "1,2,3", (1, 2, 3)), ("any", "1,x", (1, "x")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "value"), MEANT)
def test_the_replica_converts_a_text_by_its_annotation_and_the_task_has_it_as_json(
    name: str, text: str, value: Any, source: Path
) -> None:
    found = from_texts({name: text}, annotations_of(main), "main")
    assert found == {name: value}
    assert type(found[name]) is type(value)
    assert to_json(from_texts({name: text}, of_source(source, "main"), "main")[name]) == to_json(value)


REFUSED = [
    ("on", "maybe", "true or false"), ("n", "1.5", "an int"), ("n", "1e3", "an int"), ("n", "", "an int"),
    ("lr", "abc", "a float"), ("size", "medium", "one of 'small', 'large'"), ("depth", "3", "one of 1, 2"),
    ("mode", "fast", "one of FAST, SLOW"), ("level", "3", "one of LOW, HIGH"), ("limit", "x", "an int or none"),
    ("sizes", "1,x", "a list, each item an int"), ("sizes", "[1, 2", "a list, each item an int"),
    ("pair", "1", "a tuple of an int, a float"), ("pair", "1,2,3", "a tuple of an int, a float"),
    ("many", "1,x", "a tuple, each item an int"), ("rate", "x", "a float"), ("table", "1", "a JSON object"),
    ("table", "x", "a JSON object"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "taken"), REFUSED)
def test_a_text_that_does_not_fit_is_refused_by_name_before_the_launch_and_in_the_replica(
    name: str, text: str, taken: str, source: Path
) -> None:
    for known in (annotations_of(main), of_source(source, "main")):
        with pytest.raises(EntrypointArgumentsError) as caught:
            from_texts({name: text}, known, "main")
        assert str(caught.value) == f"--arg {name}={text}: main() takes {name} as {taken}."


def test_the_annotation_of_keyword_arguments_applies_to_each_of_them(source: Path) -> None:
    for known in (annotations_of(rest), of_source(source, "rest")):
        assert from_texts({"anything": "5"}, known, "rest") == {"anything": 5}
        with pytest.raises(EntrypointArgumentsError, match="takes anything as an int"):
            from_texts({"anything": "five"}, known, "rest")


def test_annotations_that_no_type_checker_takes_and_texts_of_any_depth_are_no_traceback(tmp_path: Path) -> None:
    (odd := tmp_path / "odd.py").write_text("def main(a: list[()], c: 'int |', d: Optional[()]): ...\n")
    known = of_source(odd, "main")
    assert from_texts({"a": "1", "c": "1", "d": "1"}, known, "main") == {"a": 1, "c": 1, "d": 1}
    deep = "[" * 100_000
    assert from_texts({"a": deep}, known, "main") == {"a": deep}
    with pytest.raises(EntrypointArgumentsError, match="takes sizes as a list, each item an int"):
        from_texts({"sizes": deep}, annotations_of(main), "main")
