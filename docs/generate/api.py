"""Makes the pages of the Python API from signatures and docstrings. griffe reads the sources and imports nothing."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import griffe

from docs.generate.markdown import code, table

ROOT = Path(__file__).parents[2]
WARNINGS: list[str] = []
"""The problems that griffe finds in docstrings while the pages are made. A test fails on each."""
LONG_DEFAULT = 40  # characters


@dataclass(frozen=True)
class Module:
    """A module whose public names are in the reference.

    Attributes:
        path: Its dotted name.
        names: Its public names, in the order of the page. Empty: the names of `__all__`, or else all public classes
            and functions.
        has_only_errors: True if only its errors and warnings are public, and its functions are for other modules.
    """

    path: str
    names: tuple[str, ...] = ()
    has_only_errors: bool = False


@dataclass(frozen=True)
class Part:
    """A public object and where its reference is.

    Attributes:
        path: The name that users import it by, such as `executors.launch`.
        definition: The object in its own module.
    """

    path: str
    definition: griffe.Object

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


class _Collector(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        WARNINGS.append(record.getMessage())


class OptionsOfServices(griffe.Extension):
    """Gives the constructor of an executor over a job service the options of the service.

    The decorator `options_of(Service)` replaces the parameters at run time, so the sources show only `service`.
    """

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Look through all classes of a package after it was loaded.

        Args:
            pkg: the package.
        """
        for module in _modules_of(pkg):
            for each in module.classes.values():
                constructor = None if each.is_alias else each.members.get("__init__")
                if not isinstance(constructor, griffe.Function):
                    continue
                for decorator in constructor.decorators:
                    if found := re.fullmatch(r"options_of\((\w+)\)", str(decorator.value)):
                        service = module.members[found[1]].members["__init__"]
                        constructor.parameters = service.parameters  # type: ignore[union-attr]


def _modules_of(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for each in module.modules.values():
        if not each.is_alias:
            yield from _modules_of(each)


@cache
def package(name: str) -> griffe.Object:
    """Return a package as griffe reads it from the sources. Its warnings are in `WARNINGS`."""
    log = logging.getLogger("griffe")
    if not any(isinstance(each, _Collector) for each in log.handlers):
        log.addHandler(_Collector(logging.WARNING))
        log.propagate = False
    loaded = griffe.load(
        name,
        search_paths=[ROOT],
        docstring_parser="google",
        resolve_aliases=True,
        allow_inspection=False,
        extensions=griffe.load_extensions("dataclasses", OptionsOfServices()),
    )
    if isinstance(loaded, griffe.Alias):
        raise TypeError(f"{name} is an alias")
    return loaded


def definition_of(path: str) -> griffe.Object:
    """Return the object that a dotted name stands for, in the module that defines it.

    Args:
        path: The dotted name, such as `executors.launch`.
    """
    root, _, rest = path.partition(".")
    found: Any = package(root)[rest] if rest else package(root)
    return found.final_target if isinstance(found, griffe.Alias) else found


def parts_of(module: Module) -> list[Part]:
    """Return the public classes and functions of a module."""
    here = definition_of(module.path)
    names = module.names or tuple(str(name) for name in here.exports or ())
    if not names:
        own = [each for each in here.members.values() if not each.is_alias and (each.is_class or each.is_function)]
        names = tuple(each.name for each in own if not each.name.startswith("_"))
    if module.has_only_errors:
        names = tuple(name for name in names if name.endswith(("Error", "Warning")))
    return [Part(f"{module.path}.{name}", definition_of(f"{module.path}.{name}")) for name in names]


# ------------------------------------------------------------------------------------------ one object


def page_of(title: str, about: str, modules: Sequence[Module], groups: Mapping[str, Mapping[str, str]]) -> str:
    """Return a page about the public names of modules.

    Args:
        title: The page's heading.
        about: Markdown between the heading and the first object.
        modules: The modules, in the order of the page.
        groups: For each object with many parameters, the heading of the table that each parameter belongs in.
    """
    blocks = [f"# {title}", about]
    for module in modules:
        for part in parts_of(module):
            blocks += section_of(part, 2, groups.get(part.path, {}))
    return "\n\n".join(block for block in blocks if block) + "\n"


def section_of(part: Part, level: int, groups: Mapping[str, str]) -> Iterator[str]:
    """Yield the blocks of Markdown about an object, and about its public members."""
    here = part.definition
    yield f"({part.path})="
    yield f"{'#' * level} `{part.name}`"
    if here.is_class or level == 2:
        owner = part.path.rpartition(".")[0]
        yield f"```python\nfrom {owner} import {part.name}\n```"
    yield from _texts(here, groups)
    if backend := backend_of(here):
        yield "It has the five verbs of [`ServerlessExecutor`](#executors.ServerlessExecutor)."
        yield f"[Its options](backends.md#backend-{backend}) are keyword arguments of the constructor."
        return
    if not here.is_class:
        return
    for name, target in public_members(here):
        yield from section_of(Part(f"{part.path}.{name}", target), level + 1, {})


def public_members(here: griffe.Object) -> Iterator[tuple[str, griffe.Object]]:
    """Yield the public methods and properties of a class that have a docstring, inherited ones included."""
    for name, member in here.all_members.items():
        target: Any = member.final_target if isinstance(member, griffe.Alias) else member
        if name.startswith("_") or target.path.partition(".")[0] not in ("executors", "diloco"):
            continue
        if target.has_docstring and (target.is_function or (target.is_attribute and "property" in target.labels)):
            yield name, target


def backend_of(here: griffe.Object) -> str:
    """Return the backend's name if the object is the executor of one of our backends, else an empty text."""
    found = here.members.get("backend_name")
    value = getattr(found, "value", None)
    return str(value).strip("'\"") if here.is_class and value is not None else ""


def _texts(here: griffe.Object, groups: Mapping[str, str]) -> Iterator[str]:
    sections = docstring_of(here)
    by_kind: dict[str, list[Any]] = {}
    for section in sections:
        by_kind.setdefault(section.kind.value, []).append(section)
    summary, *more = "\n\n".join(section.value for section in by_kind.get("text", ())).split("\n\n") or [""]
    yield summary
    for section in by_kind.get("admonition", ()):
        if section.value.kind in ("example", "examples"):
            yield f"```python\n{section.value.contents.strip()}\n```"
    for section in by_kind.get("examples", ()):
        for kind, text in section.value:
            yield text if kind.value == "text" else f"```python\n{text.strip()}\n```"
    yield from more
    described = descriptions_of(here)
    # A long list of parameters has several sections with titles, such as "Args: Slow links".
    titled = [section for section in by_kind.get("parameters", ()) if section.title]
    groups = {each.name: section.title for section in titled for each in section.value} | dict(groups)
    attributes = [each for section in by_kind.get("attributes", ()) for each in section.value]
    # The parameters of a record are its attributes, so one table describes both.
    is_record = bool(attributes) and not by_kind.get("parameters")
    if (parameters := parameters_of(here)) and not backend_of(here) and not is_record:
        yield from _parameter_tables(parameters, described, groups)
    if attributes:
        rows = [[code(each.name), code(str(each.annotation or "")), _line(each.description)] for each in attributes]
        yield table(("attribute", "type", "meaning"), rows)
    for section in by_kind.get("returns", ()):
        yield "**Returns** " + " ".join(_line(each.description) for each in section.value)
    if raises := [each for section in by_kind.get("raises", ()) for each in section.value]:
        rows = [[code(str(each.annotation)), _line(each.description)] for each in raises]
        yield table(("raises", "when"), rows)
    for section in by_kind.get("admonition", ()):
        if section.value.kind not in ("example", "examples"):
            yield f"**{section.title or section.value.kind.capitalize()}**\n\n{section.value.contents}"


def docstring_of(here: griffe.Object) -> list[Any]:
    """Return the parsed sections of an object's docstring; a class has the sections of its constructor, too."""
    sections = list(here.docstring.parsed) if here.docstring else []
    constructor = here.members.get("__init__") if here.is_class else None
    if constructor is not None and not constructor.is_alias and constructor.docstring:
        sections += constructor.docstring.parsed
    return sections


def descriptions_of(here: griffe.Object) -> dict[str, str]:
    """Return the description of each parameter, from the docstrings of the object and of its attributes.

    The parameters of a record are its attributes, and the constructor of a class may be its parent's.

    Args:
        here: the function or class.
    """
    found: dict[str, str] = {}
    for each in (here, *(here.mro() if isinstance(here, griffe.Class) else ())):
        for section in docstring_of(each):
            if section.kind.value in ("parameters", "attributes"):
                for entry in section.value:
                    found.setdefault(entry.name.lstrip("*"), entry.description)
        if each.is_class:
            for name, member in each.members.items():
                if not member.is_alias and member.is_attribute and member.docstring:
                    found.setdefault(name, member.docstring.value)
    return found


def parameters_of(here: griffe.Object) -> list[griffe.Parameter]:
    """Return the parameters that a user gives: of a function, or of a class's constructor."""
    found: Any = here
    if here.is_class:
        found = here.all_members.get("__init__")
    if found is None:
        return []
    target: Any = found.final_target if isinstance(found, griffe.Alias) else found
    if not target.is_function or "property" in target.labels:
        return []
    return [each for each in target.parameters if each.name not in ("self", "cls") and not each.name.startswith("_")]


def _parameter_tables(
    parameters: Sequence[griffe.Parameter], described: Mapping[str, str], groups: Mapping[str, str]
) -> Iterator[str]:
    by_group: dict[str, list[list[str]]] = {}
    for each in parameters:
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(each.kind.value if each.kind else "", "")
        default = "" if each.default is None or stars else code(_short(str(each.default)))
        row = [
            code(stars + each.name),
            code(_plain(each.annotation)),
            default,
            _line(described.get(each.name, "")),
        ]
        by_group.setdefault(groups.get(each.name, ""), []).append(row)
    for heading in dict.fromkeys([*groups.values(), ""]):
        if rows := by_group.get(heading):
            if heading:
                yield f"**{heading}**"
            yield table(("parameter", "type", "default", "meaning"), rows)


def _plain(annotation: Any) -> str:
    """Return an annotation without the modules of its names."""
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", str(annotation)) if annotation is not None else ""


def _short(default: str) -> str:
    return default if len(default) <= LONG_DEFAULT else default[: LONG_DEFAULT - 1] + "…"


def _line(text: str) -> str:
    return " ".join(text.split())
