"""Finds, checks and loads the function that the name of an entrypoint means.

    pkg.mod:f         function f of a module
    pkg.mod.f         the same; if a module pkg.mod.f exists, the function `main` of that module
    path/file.py:f    function f of a file
    path/file.py      function `main` of a file

A file is loaded under its stem, so its part below `if __name__ == "__main__"` does not run. Two more forms run that
part. Both are functions of `argv`.

    path/file.py:__main__    as `python path/file.py ARGV…` runs it
    pkg.mod:__main__         as `python -m pkg.mod ARGV…` runs it

`runs_as_script` decides the form of a name without a function. The entrypoint of each form finds its own file as
`sys.argv[0]`.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from executors.errors import (
    EntrypointArgumentsError,
    EntrypointError,
    EntrypointImportError,
    did_you_mean,
    kind_of,
)
from executors.module_search import PARSING, RESERVED, search_first
from executors.task.command import Command

SCRIPT = "__main__"
MAX_CHOICES = 3


@dataclass(frozen=True)
class EntrypointName:
    """A parsed entrypoint: a file or a module, and the function in it."""

    text: str
    file: Path | None
    """The file. None: the entrypoint names a module."""
    module: str
    function: str | None
    """The name of the function. None: the entrypoint names none."""


def parse_entrypoint(text: str) -> EntrypointName:
    """Parse the name of an entrypoint.

    Args:
        text: the name, as in "train.py:main".

    Raises:
        EntrypointError: the name has none of the four forms.
    """
    place, colon, function = text.rpartition(":") if ":" in text else (text, "", "")
    if place.endswith(".py") or "/" in place:
        file = Path(place)
        if file.suffix != ".py" or (colon and not function.isidentifier()):
            raise EntrypointError(f"Bad entrypoint {text!r}. A file is given as path/file.py or path/file.py:function.")
        return EntrypointName(text, file, file.stem, function or "main")
    if not all(part.isidentifier() for part in place.split(".")) or (colon and not function.isidentifier()):
        raise EntrypointError(
            f"Bad entrypoint {text!r}. Use pkg.mod:function, pkg.mod.function, path/file.py:function or path/file.py."
        )
    return EntrypointName(text, None, place, function or None)


def check_entrypoint(text: str, args: Mapping[str, Any]) -> None:
    """Check in the source that an entrypoint exists and takes these arguments. The source is not run.

    Args:
        text: the entrypoint.
        args: the keyword arguments.

    Raises:
        EntrypointImportError: there is no such file, module or function.
        EntrypointArgumentsError: the function cannot be called with these keyword arguments.
    """
    found = find_definition(text)
    if found is None:
        return
    tree, function = found
    if function == SCRIPT:
        if unknown := sorted(set(args) - {"argv"}):
            raise EntrypointArgumentsError(
                f"{shown(text)!r} runs as a script, which takes no argument {unknown[0]!r}. Give its options after "
                f"--: {command_for(text)} -- --{unknown[0]} …"
            )
        return
    if (file := parse_entrypoint(text).file) is not None:
        _check_name(file.stem, text)
    _check_definition(tree, function, args, text)


def find_source(text: str) -> tuple[Path, str] | None:
    """Return the file of an entrypoint, and the name of its function.

    Args:
        text: the entrypoint.

    Returns: the file and the name. None: the module is built in or compiled, so it has no source.

    Raises:
        EntrypointImportError: there is no such file or module.
    """
    name, text = parse_entrypoint(text), shown(text)
    if name.file is not None:
        if not name.file.is_file():
            beside = [path.name for path in name.file.parent.glob("*.py")] if name.file.parent.is_dir() else []
            hint = did_you_mean(name.file.name, beside)
            where = str(name.file.absolute())
            raise EntrypointImportError(f"Entrypoint {text!r}: the file {where!r} does not exist.{hint}")
        return name.file, name.function or "main"
    spec, function = find_module(name.module), name.function or "main"
    if spec is None and name.function is None and "." in name.module:
        module, _, function = name.module.rpartition(".")
        spec = find_module(module)
    if spec is None:
        raise EntrypointImportError(
            f"Entrypoint {text!r}: there is no module {name.module!r} on sys.path. Run the command from the folder "
            "that holds it, or install it."
        )
    if function == SCRIPT and spec.submodule_search_locations is not None:
        spec = find_module(f"{name.module}.{SCRIPT}")
        if spec is None:
            raise EntrypointImportError(
                f"Entrypoint {text!r} is a package without a __main__.py, so `python -m {text}` cannot run it either. "
                f"Name a module of it, as in {text}.train."
            )
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None  # the module is built in or compiled, so only an import would show its functions
    return Path(spec.origin), function


def find_definition(text: str) -> tuple[ast.Module, str] | None:
    """Return the parsed source of an entrypoint, and the name of its function.

    Args:
        text: the entrypoint.

    Returns: the source and the name. None: the module has no source.

    Raises:
        EntrypointImportError: there is no such file or module, or its source has a syntax error.
    """
    found, text = find_source(text), shown(text)
    if found is None:
        return None
    try:
        with PARSING:
            tree = ast.parse(found[0].read_bytes(), str(found[0]))
    except SyntaxError as error:
        raise EntrypointImportError(f"Entrypoint {text!r}: {found[0]}, line {error.lineno}: {error.msg}.") from error
    return tree, found[1]


def runs_as_script(text: str, *, has_arguments: bool = False) -> bool:
    """Return True if an entrypoint without a function's name is run as `python` would run it, instead of calling its
    `main`.

    A call of `main` has a result, and a file that Python runs has none. So `main` is called if Python itself would only
    call `main`. ADR 0044 has the table.

    Args:
        text: the entrypoint.
        has_arguments: True if the launch gives keyword arguments, which only a function takes.

    Raises:
        EntrypointImportError: there is no such file or module, or its source has a syntax error.

    Example:
        runs_as_script("train.py")  # True for a file that ends with: if __name__ == "__main__": main(parse_args())
    """
    name = parse_entrypoint(text)
    if ":" in text or (name.file is None and find_module(name.module) is None):
        return False  # the text names a function, so no other rule applies
    found = find_definition(text)
    names = None if found is None else _names_in(found[0])
    if found is None or names is None:
        return False
    tree = found[0]
    if "main" not in names:
        # A module without a `main` is usually a mistake. A module that is meant to run as a script is given with -m.
        return name.file is not None and _does_something(tree)
    if has_arguments:
        return False
    guard = _guarded(tree)
    if guard is None:
        return _calls_main_unguarded(tree)
    definition = _definition_in(tree, "main")
    needs_arguments = isinstance(definition, ast.FunctionDef) and _needed_by(definition.args) != []
    return needs_arguments or isinstance(definition, ast.AsyncFunctionDef) or not _only_calls_main(guard)


def _does_something(tree: ast.Module) -> bool:
    """Return True if a module does more than to define functions, classes and constants."""
    runs = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
    return any(
        isinstance(node, runs) or (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant))
        for node in tree.body
    )


def _is_guard(node: ast.stmt) -> bool:
    """Return True if a statement is an `if __name__ == "__main__"`, perhaps with more in its condition."""
    return isinstance(node, ast.If) and any(
        isinstance(each, ast.Compare)
        and {"'__main__'", "__name__"} <= {ast.unparse(side) for side in (each.left, *each.comparators)}
        for each in ast.walk(node.test)
    )


def _guarded(tree: ast.Module) -> list[ast.stmt] | None:
    """Return the statements of a module that run only in a script; None if there are none."""
    guards = [node for node in tree.body if isinstance(node, ast.If) and _is_guard(node)]
    return [statement for guard in guards for statement in guard.body] if guards else None


def _only_calls_main(guard: Sequence[ast.stmt]) -> bool:
    """Return True if the statements only call `main()` once, and perhaps assign or print its result.

    `sys.exit(main())` does more, because the result is an exit code there.
    """
    if len(guard) != 1 or not isinstance(statement := guard[0], ast.Expr | ast.Assign | ast.AnnAssign):
        return False
    return ast.unparse(statement.value or statement) in ("main()", "print(main())")


def _calls_main_unguarded(tree: ast.Module) -> bool:
    """Return True if loading a module calls `main`, or passes it to a caller, as in `fire.Fire(main)`."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    calls = [
        call
        for node in tree.body
        if not isinstance(node, definitions)
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and (isinstance(node, ast.Expr) or ast.unparse(call.func) == "main")
    ]
    return any("main" in map(ast.unparse, (call.func, *call.args)) for call in calls)


def _needed_by(taken: ast.arguments) -> list[str]:
    """Return the names of the parameters without a default."""
    positional = [*taken.posonlyargs, *taken.args]
    needed = positional[: len(positional) - len(taken.defaults)]
    needed += [arg for arg, value in zip(taken.kwonlyargs, taken.kw_defaults, strict=True) if value is None]
    return [arg.arg for arg in needed]


def signature_in(tree: ast.Module, function: str) -> ast.arguments | None:
    """Return the parameters of a function in the source of a module.

    Args:
        tree: the parsed source.
        function: the name of the function.

    Returns: the parameters. None: the source has no plain definition of the function.
    """
    definition = _definition_in(tree, function)
    return definition.args if isinstance(definition, ast.FunctionDef) else None


@dataclass(frozen=True)
class _PreparedFile:
    """The file of an entrypoint, found and compiled."""

    path: Path
    function: str
    spec: importlib.machinery.ModuleSpec
    code: CodeType


_prepared: dict[str, _PreparedFile] = {}


def prepare_entrypoint(text: str) -> None:
    """Find and compile the file of an entrypoint, once for all processes that this process forks.

    The file is not run, and errors are ignored, because loading the file raises them again. An entrypoint in a module
    is not prepared.

    Args:
        text: the entrypoint.
    """
    name = parse_entrypoint(text)
    if name.file is not None and name.function != SCRIPT:
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            path = name.file.resolve()
            loader = importlib.machinery.SourceFileLoader(path.stem, str(path))
            spec = importlib.util.spec_from_file_location(path.stem, path, loader=loader)
            code = loader.get_code(path.stem)
            if spec is not None and code is not None:
                _prepared[text] = _PreparedFile(path, name.function or "main", spec, code)


_loading: list[str] = []


@contextlib.contextmanager
def loading(what: str) -> Iterator[None]:
    """Note within the block that user code is being imported, because that code must not call `launch()`.

    Args:
        what: the name of the module, for the error.
    """
    _loading.append(what)
    try:
        yield
    finally:
        _loading.pop()


def check_nothing_loads() -> None:
    """Check that no user code is being imported, because each replica would launch the run again.

    Raises:
        EntrypointError: a replica is importing the caller's module.
    """
    if _loading:
        raise EntrypointError(
            f"launch() is called while {_loading[-1]} is imported for a replica, and each replica would call "
            "it again. Put the call under `if __name__ == '__main__':`, or in a file of its own."
        )


def load_entrypoint(text: str) -> Callable[..., Any]:
    """Import an entrypoint, and return its function. This runs the user's module, so only replicas may call it.

    Before the import, `sys.argv` is set to the entrypoint's file, because the module may parse it. Exceptions of the
    module are passed on.

    Args:
        text: the entrypoint.

    Raises:
        EntrypointImportError: there is no such file, module or function.
    """
    with loading(repr(shown(text))):
        return _load(text)


def _load(text: str) -> Callable[..., Any]:
    name = parse_entrypoint(text)
    if name.file is not None:
        sys.argv = [str(name.file)]
        if name.function == SCRIPT:
            return functools.partial(_run_script, name.file)
        if prepared := _prepared.get(text):
            return _attribute(_load_file(prepared.path, text, prepared), prepared.function, text)
        return _attribute(_load_file(name.file.resolve(), text), name.function or "main", text)
    if name.function == SCRIPT:
        return functools.partial(_run_module, name.module)
    module, function, spec = name.module, name.function or "main", find_module(name.module)
    if spec is None and name.function is None and "." in module:
        module, _, function = module.rpartition(".")
        spec = find_module(module)
    sys.argv = [module if spec is None or spec.origin is None else spec.origin]
    return _attribute(_import(module, text), function, text)


def argv_of(function: Callable[..., Any]) -> list[str]:
    """Return `sys.argv` for a callable: the file that defines it, as a script finds its own file.

    Args:
        function: the callable.
    """
    named = named_by(function)
    code = getattr(_unwrapped(named), "__code__", None)
    file = getattr(sys.modules.get(str(getattr(named, "__module__", None))), "__file__", None)
    return [str(code.co_filename if code is not None else file or named.__qualname__)]


def _unwrapped(function: Any) -> Any:
    """Return the function inside decorators that set `__wrapped__`. `inspect.unwrap` does the same, but the import of
    `inspect` takes too long."""
    seen: set[int] = set()
    while hasattr(function, "__wrapped__") and id(function) not in seen:
        seen.add(id(function))
        function = function.__wrapped__
    return function


def _run_script(file: Path, argv: Sequence[str] = ()) -> None:
    """Run a file as `python file.py argv…` does."""
    import runpy

    sys.argv = [str(file), *argv]
    search_first(str(file.resolve().parent))
    runpy.run_path(str(file), run_name=SCRIPT)


def _run_module(module: str, argv: Sequence[str] = ()) -> None:
    """Run a module, or the `__main__.py` of a package, as `python -m module argv…` does."""
    import runpy

    sys.argv = [module, *argv]  # runpy replaces the first item with the module's file
    runpy.run_module(module, run_name=SCRIPT, alter_sys=True)


def runs_nothing(what: str, kind: str) -> EntrypointError:
    """Return the error for a function that is not a plain one.

    Args:
        what: the name of the function.
        kind: "async" or "a generator".
    """
    advice = "asyncio.run(…)" if kind == "async" else "a loop over it"
    return EntrypointError(
        f"{what} is {kind}: calling it runs nothing of it. Give a plain function that has {advice} inside."
    )


def _import(module: str, text: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
            raise EntrypointImportError(
                f"Entrypoint {text!r}: {error}. Run the command from the folder that holds it, or install it."
            ) from None
        raise


def _load_file(path: Path, text: str, prepared: _PreparedFile | None = None) -> Any:
    if prepared is None and not path.is_file():
        raise EntrypointImportError(f"Entrypoint {text!r}: the file {str(path)!r} does not exist.")
    _check_name(path.stem, text)
    module = sys.modules.get(path.stem)
    if module is not None:
        if getattr(module, "__file__", None) and os.path.realpath(str(module.__file__)) == str(path):
            return module
        raise EntrypointImportError(
            f"Entrypoint {text!r} would be loaded as {path.stem!r}, which is another module "
            f"({getattr(module, '__file__', 'built in')}). Rename the file."
        )
    search_first(str(path.parent))  # so that modules beside the file can be imported, as with `python path/file.py`
    spec = importlib.util.spec_from_file_location(path.stem, path) if prepared is None else prepared.spec
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        if prepared is None:
            spec.loader.exec_module(module)
        else:
            exec(prepared.code, vars(module))
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


def _check_name(stem: str, text: str) -> None:
    """Refuse a file whose name belongs to another module in a replica.

    Raises:
        EntrypointImportError: the file cannot be loaded under its name.
    """
    if stem in RESERVED:
        raise EntrypointImportError(
            f"Entrypoint {text!r} would be loaded as {stem!r}, which is another module, of Python or of an installed "
            "package. Rename the file."
        )


def _attribute(module: Any, function: str, text: str) -> Callable[..., Any]:
    found = getattr(module, function, None)
    if not callable(found):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        if hasattr(module, function):
            where = f"{function!r} in {module.__name__!r} is {kind_of(found)}"
            raise EntrypointImportError(f"Entrypoint {text!r}: {where}, not a function.")
        raise EntrypointImportError(
            f"Entrypoint {text!r}: {function!r} does not exist in {module.__name__!r}.{_hint(function, known)}"
        )
    return found  # type: ignore[no-any-return]


def find_module(dotted: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module without importing its parent packages, unlike `importlib.util.find_spec`.

    Args:
        dotted: the dotted name of the module.

    Returns: the spec. None: there is no such module.
    """
    path: list[str] | None = None
    spec = None
    # All finders, because an editable install adds its own one.
    finders: list[Any] = [each for each in sys.meta_path if hasattr(each, "find_spec")]
    for part in dotted.split("."):
        # Only the last part of the name is given, because for a dotted name PathFinder needs the parents to be
        # imported.
        spec = next((found for finder in finders if (found := finder.find_spec(part, path)) is not None), None)
        if spec is None:
            return None
        path = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
        finders = [] if path is None else [importlib.machinery.PathFinder]
    return spec


def _names_in(tree: ast.Module) -> set[str] | None:
    """Return the names that a module may define. None: the source does not show all of them."""
    if any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body):
        return None  # the module computes its attributes
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            if any(alias.name == "*" for alias in node.names):
                return None  # only an import shows the names behind *
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    return names


def _definition_in(tree: ast.Module, name: str) -> ast.stmt | None:
    """Return the last definition of a name at the top of a module, through `name = other`."""
    for node in reversed(tree.body):
        if getattr(node, "name", None) == name:
            return node
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            before = ast.Module(tree.body[: tree.body.index(node)], [])
            return _definition_in(before, node.value.id) if isinstance(node.value, ast.Name) else node
    return None


def _check_definition(tree: ast.Module, function: str, args: Mapping[str, Any], text: str) -> None:
    names = _names_in(tree)
    if names is None:
        return
    if function not in names:
        known = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        public = [name for name in known if not name.startswith("_")]
        if function == "main" and ":" not in text and public:
            choices = " or ".join(f"{text}:{name}" for name in public[:MAX_CHOICES])
            is_module = not text.endswith(".py") and _does_something(tree)
            run = f" Or run it as python -m {text} does: {command_for(f'{text}:{SCRIPT}')}" if is_module else ""
            raise EntrypointImportError(f"Entrypoint {text!r} has no main. Name the function: {choices}{run}")
        raise EntrypointImportError(f"Entrypoint {text!r}: {function!r} does not exist in it.{_hint(function, known)}")
    definition = _definition_in(tree, function)
    if isinstance(definition, ast.AsyncFunctionDef) and not definition.decorator_list:
        raise runs_nothing(f"Entrypoint {text!r}: {function}()", "async")
    if isinstance(definition, ast.FunctionDef) and not definition.decorator_list:
        _check_arguments(definition.args, args, function, text)


def _check_arguments(taken: ast.arguments, given: Mapping[str, Any], function: str, text: str) -> None:
    named = [arg.arg for arg in [*taken.args, *taken.kwonlyargs]]
    n_required = max(0, len(taken.args) - len(taken.defaults))  # defaults may belong to positional-only parameters, too
    with_default = {arg.arg for arg in taken.args[n_required:]}
    with_default |= {
        arg.arg for arg, value in zip(taken.kwonlyargs, taken.kw_defaults, strict=True) if value is not None
    }
    unknown = [] if taken.kwarg else [name for name in given if name not in named]
    missing = [name for name in named if name not in given and name not in with_default]
    problems = [f"takes no argument {name!r}.{_hint(name, named)}" for name in unknown]
    # A missing argument whose name was only mistyped is reported once, with the mistyped name.
    missing = [name for name in missing if not any(f"Did you mean {name!r}?" in problem for problem in problems)]
    if missing:
        names, flags = ", ".join(map(repr, missing)), " ".join(f"--arg {name}=…" for name in missing)
        values = ", ".join(f"{name!r}: …" for name in missing)
        noun, pronoun = ("argument", "it") if len(missing) == 1 else ("arguments", "them")
        problems.append(f"needs the {noun} {names}. Give {pronoun} with {flags} or args={{{values}}}.")
    if problems:
        raise EntrypointArgumentsError(f"Entrypoint {text!r}: {function}() {' It '.join(problems)}")


def _hint(name: str, known: list[str]) -> str:
    return did_you_mean(name, known) or (f" Known: {', '.join(sorted(known))}." if known else "")


def shown(entrypoint: str) -> str:
    """Return the name of an entrypoint as users write it. For a script this is its file or its module.

    Args:
        entrypoint: the name.
    """
    return entrypoint.removesuffix(f":{SCRIPT}")


def command_for(entrypoint: str) -> str:
    """Return the command that launches an entrypoint as a script, without the options after `--`.

    Args:
        entrypoint: the name.
    """
    name = shown(entrypoint).partition(":")[0]
    return f"replicas launch {name if name.endswith('.py') else f'-m {name}'} --n 4"


def describe(entrypoint: str | Callable[..., Any]) -> str:
    """Return the name of an entrypoint for records. An object is named by its class, and not by its repr.

    Args:
        entrypoint: the callable, or its name.
    """
    if isinstance(entrypoint, str | Command):
        return str(entrypoint)
    named = named_by(entrypoint)
    return f"{getattr(named, '__module__', '?')}.{named.__qualname__}"


def named_by(function: Callable[..., Any]) -> Any:
    """Return the function inside a partial, the class of a callable object, or else the callable itself.

    Args:
        function: the callable.
    """
    while isinstance(function, functools.partial):
        function = function.func
    return function if hasattr(function, "__qualname__") else type(function)
