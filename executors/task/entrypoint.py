"""From the name of an entrypoint to a function, and the checks before anything is started.

    pkg.mod:f         function f of a module
    pkg.mod.f         the same; a module named so wins, and its `main` is meant
    path/file.py:f    function f of a file
    path/file.py      its `main`

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

SCRIPT = "__main__"
MAX_CHOICES = 3


@dataclass(frozen=True)
class EntrypointName:
    """A parsed entrypoint: either a file or a module, and the function in it (None: not said)."""

    text: str
    file: Path | None
    module: str
    function: str | None


def parse_entrypoint(text: str) -> EntrypointName:
    """Take an entrypoint's name apart.

    Raises:
        EntrypointError: it has none of the four forms.
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
    """Check that an entrypoint exists and takes these arguments, as far as its source shows, without running any of it.

    Raises:
        EntrypointImportError: no such file, module or function.
        EntrypointArgumentsError: the function cannot be called with these keyword arguments.
    """
    found = find_definition(text)
    if found is None:
        return
    tree, function = found
    if function == SCRIPT:
        if unknown := sorted(set(args) - {"argv"}):
            raise EntrypointArgumentsError(
                f"{shown(text)!r} runs as a script, which takes no argument {unknown[0]!r}. Give its options behind "
                f"--: {command_for(text)} -- --{unknown[0]} …"
            )
        return
    if (file := parse_entrypoint(text).file) is not None:
        _check_name(file.stem, text)
    _check_definition(tree, function, args, text)


def find_source(text: str) -> tuple[Path, str] | None:
    """Return an entrypoint's file and function; None: no source shows. Raises EntrypointImportError: there is none."""
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
        return None  # built in, or compiled: only loading it would show
    return Path(spec.origin), function


def find_definition(text: str) -> tuple[ast.Module, str] | None:
    """Return the source of an entrypoint, parsed, and the function's name. Raises what `find_source` does."""
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
    """Return whether an entrypoint without a function's name is run as `python` runs it, and not by calling its `main`.

    A call of `main` has a result, and Python's way of running a file has none. So `main` is called if Python would do
    nothing else. ADR 0044 has the table.

    Args:
        text: the entrypoint.
        has_arguments: whether the launch gives keyword arguments, which only a function takes.

    Raises:
        EntrypointImportError: there is no such file or module, or its source has a syntax error.

    Example:
        runs_as_script("train.py")  # True for a file that ends with: if __name__ == "__main__": main(parse_args())
    """
    name = parse_entrypoint(text)
    if ":" in text or (name.file is None and find_module(name.module) is None):
        return False  # it names a function
    found = find_definition(text)
    names = None if found is None else _names_in(found[0])
    if found is None or names is None:
        return False
    tree = found[0]
    if "main" not in names:
        # A module without a `main` is named by mistake more often than it is meant to be run: that takes -m.
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
    """Return whether running a module does more than to define things."""
    runs = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
    return any(
        isinstance(node, runs) or (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant))
        for node in tree.body
    )


def _is_guard(node: ast.stmt) -> bool:
    """Return whether a statement is an `if __name__ == "__main__"`, perhaps with more in its condition."""
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
    """Return whether statements call `main` without arguments, once, and at most keep or print what it returns.

    `sys.exit(main())` is more: there the result is an exit code.
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
    """Return the parameters of a module's function, as they are written; None where that does not show."""
    definition = _definition_in(tree, function)
    return definition.args if isinstance(definition, ast.FunctionDef) else None


@dataclass(frozen=True)
class _PreparedFile:
    """An entrypoint's file, found and compiled."""

    path: Path
    function: str
    spec: importlib.machinery.ModuleSpec
    code: CodeType


_prepared: dict[str, _PreparedFile] = {}


def prepare_entrypoint(text: str) -> None:
    """Find and compile the file of an entrypoint, if it names one, once for all processes that are forked from here.

    Runs nothing of it. What is wrong with it, loading it will say.
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
    """Note that the user's code is imported for a replica, or to be checked: meanwhile it must not launch itself."""
    _loading.append(what)
    try:
        yield
    finally:
        _loading.pop()


def check_nothing_loads() -> None:
    """Raises: EntrypointError: the caller's module is imported for a replica, which would launch without end."""
    if _loading:
        raise EntrypointError(
            f"launch() is called while {_loading[-1]} is imported for a replica, and each replica would call "
            "it again. Put the call under `if __name__ == '__main__':`, or into a file of its own."
        )


def load_entrypoint(text: str) -> Callable[..., Any]:
    """Import an entrypoint. Runs the user's module, so only replicas and throw-away processes call it.

    From here on, `sys.argv` has the entrypoint's file alone, because the user's module may parse it while importing.

    Args:
        text: the entrypoint.

    Raises:
        EntrypointImportError: no such file, module or function. What the module itself raises is passed on.
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
    """Return what a callable finds as `sys.argv`: the file that it is defined in, as a script would find its own."""
    named = named_by(function)
    code = getattr(_unwrapped(named), "__code__", None)
    file = getattr(sys.modules.get(str(getattr(named, "__module__", None))), "__file__", None)
    return [str(code.co_filename if code is not None else file or named.__qualname__)]


def _unwrapped(function: Any) -> Any:
    """Return the function below decorators that name the function they wrap. `inspect` takes too long to import for
    this."""
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

    sys.argv = [module, *argv]  # runpy replaces the first by the module's file
    runpy.run_module(module, run_name=SCRIPT, alter_sys=True)


def runs_nothing(what: str, kind: str) -> EntrypointError:
    """Return the error of a function that is not a plain one."""
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
    search_first(str(path.parent))  # as for `python path/file.py`: modules beside it can be imported
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
    """Find a module's spec without importing its parent packages, which `importlib.util.find_spec` would."""
    path: list[str] | None = None
    spec = None
    finders: list[Any] = [each for each in sys.meta_path if hasattr(each, "find_spec")]  # an editable install has one
    for part in dotted.split("."):
        # By its own name alone: PathFinder would look for the parents of a dotted one among the imported modules.
        spec = next((found for finder in finders if (found := finder.find_spec(part, path)) is not None), None)
        if spec is None:
            return None
        path = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
        finders = [] if path is None else [importlib.machinery.PathFinder]
    return spec


def _names_in(tree: ast.Module) -> set[str] | None:
    """Return what a module may define; None where that does not show."""
    if any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body):
        return None  # a module that makes its attributes up
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            if any(alias.name == "*" for alias in node.names):
                return None  # what it brings, only importing shows
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
    n_required = max(0, len(taken.args) - len(taken.defaults))  # defaults are of positional-only ones, too
    with_default = {arg.arg for arg in taken.args[n_required:]}
    with_default |= {
        arg.arg for arg, value in zip(taken.kwonlyargs, taken.kw_defaults, strict=True) if value is not None
    }
    unknown = [] if taken.kwarg else [name for name in given if name not in named]
    missing = [name for name in named if name not in given and name not in with_default]
    problems = [f"takes no argument {name!r}.{_hint(name, named)}" for name in unknown]
    for name in missing:
        if not any(f"Did you mean {name!r}?" in problem for problem in problems):
            problems.append(f"needs the argument {name!r}. Give it with --arg {name}=… or args={{{name!r}: …}}.")
    if problems:
        raise EntrypointArgumentsError(f"Entrypoint {text!r}: {function}() {' It '.join(problems)}")


def _hint(name: str, known: list[str]) -> str:
    return did_you_mean(name, known) or (f" Known: {', '.join(sorted(known))}." if known else "")


def shown(entrypoint: str) -> str:
    """Return an entrypoint's name as people write it: a script is its file, or its module."""
    return entrypoint.removesuffix(f":{SCRIPT}")


def command_for(entrypoint: str) -> str:
    """Return the command that launches an entrypoint as a script, without what follows `--`."""
    name = shown(entrypoint).partition(":")[0]
    return f"replicas launch {name if name.endswith('.py') else f'-m {name}'} --n 4"


def describe(entrypoint: str | Callable[..., Any]) -> str:
    """Name an entrypoint in one string, as records have it: of an object its class, for others may read them."""
    if isinstance(entrypoint, str):
        return entrypoint
    named = named_by(entrypoint)
    return f"{getattr(named, '__module__', '?')}.{named.__qualname__}"


def named_by(function: Callable[..., Any]) -> Any:
    """Return what a callable is named by: of a partial what it calls, and of an object its class."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if hasattr(function, "__qualname__") else type(function)
