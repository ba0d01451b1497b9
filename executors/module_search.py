"""Decides which module an import finds in a process that runs this project's code and then the user's code.

Python searches the folder of a script first, also for imports of the standard library and of installed packages. So a
`random.py` or `logging.py` of the user would break torch, numpy and this project. Therefore some names are reserved in
the processes that we start: the names of the standard library, of our packages, and of the packages that ours need. A
reserved name is never searched for in the user's folders. Python finds any other name as usual, in the user's folders
first.
"""

from __future__ import annotations

import contextlib
import os
import sys
from _thread import allocate_lock
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

OURS = ("executors", "diloco")
DEPENDENCIES = frozenset({
    "torch", "numpy", "tenacity", "cloudpickle", "xxhash", "blake3", "typer", "click", "rich", "platformdirs",
    "packaging", "jinja2", "inotify_simple", "boto3",
    # The packages that the packages above need.
    "functorch", "torchgen", "sympy", "mpmath", "networkx", "filelock", "fsspec", "typing_extensions", "markupsafe",
    "markdown_it", "mdurl", "pygments", "shellingham", "botocore", "s3transfer", "jmespath", "urllib3", "dateutil",
    "six", "annotated_doc",
})  # fmt: skip
"""The packages that our code and the store for buckets import, directly or indirectly."""
NOT_RESERVED = frozenset({"test", "this", "antigravity", "turtle", "turtledemo", "idlelib", "tkinter", "__hello__"})
"""Names of the standard library that no library imports. `test.py` is a usual name for a user's module."""
RESERVED = (sys.stdlib_module_names | DEPENDENCIES | {*OURS}) - NOT_RESERVED
ROOT = str(Path(__file__).parents[1])
STANDARD_LIBRARY = os.path.dirname(os.__file__)
EXTENSIONS = ("lib-dynload", "DLLs")  # folders of sys.path with the standard library's compiled modules
MAX_FILES, MAX_BYTES = 200, 1 << 20  # limits of the files that are read for a warning
SET_PATHS = """
import sys
n = int(sys.argv[1])
sys.path[:] = sys.argv[2 : 2 + n]
del sys.argv[1 : 2 + n]
"""
"""The code that a new Python process runs first. It imports nothing, because PYTHONPATH may name the user's folder."""

_user_folders: set[str] = set()
PARSING = allocate_lock()
"""A lock for parsing a file, because CPython counts the depth of the syntax trees of all threads together."""


class ReservedNames:
    """A finder of `sys.meta_path` for reserved names. It leaves all other names to the finders after it."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a reserved top-level module. None: the name is not reserved.

        Args:
            name: the module's full name.
            path: the folders in which a package finds its modules. None: the module is a top-level one.
            target: not used.
        """
        if path is not None or name not in RESERVED:
            return None
        if name in OURS:
            folders = [ROOT]
        elif name in sys.stdlib_module_names:
            folders = [STANDARD_LIBRARY, *(entry for entry in sys.path if os.path.basename(entry) in EXTENSIONS)]
        else:
            folders = [entry for entry in sys.path if not _is_users(entry)]
        found = PathFinder.find_spec(name, folders)
        # A folder without __init__.py is not the package of that name. A later finder may find the real one.
        return None if found is None or found.loader is None else found


def reserve_names(folders: Iterable[str]) -> None:
    """From now on, never search reserved names in the user's folders. This also holds in forked children.

    Args:
        folders: folders of `sys.path` that hold the user's own modules.
    """
    _user_folders.update(map(os.path.realpath, folders))
    if ReservedNames not in sys.meta_path:
        # After the finders of built-in and frozen modules, which need no path, and before the finder of sys.path.
        at = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else 0
        sys.meta_path.insert(at, ReservedNames)


def search_first(folder: str) -> None:
    """Make Python look for modules in the user's folder first, except for reserved names.

    Args:
        folder: the folder of the user's modules, such as the folder of a script.
    """
    reserve_names([folder])
    sys.path.insert(0, folder)


@contextlib.contextmanager
def restored_search_path() -> Iterator[None]:
    """Undo changes that the block makes to `sys.path` and to the user's folders."""
    paths, folders, has_finder = [*sys.path], {*_user_folders}, ReservedNames in sys.meta_path
    try:
        yield
    finally:
        sys.path[:] = paths
        _user_folders.clear()
        _user_folders.update(folders)
        if not has_finder and ReservedNames in sys.meta_path:
            sys.meta_path.remove(ReservedNames)


def user_folders() -> list[str]:
    """Return the known folders of the user's modules: the working directory, and the folder of the script."""
    with contextlib.suppress(OSError):  # the working directory was deleted
        here = os.getcwd()
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        beside = [os.path.dirname(os.path.abspath(script))] if script else []
        return sorted({*map(os.path.realpath, (here, *beside)), *_user_folders})
    return sorted(_user_folders)


def new_python(code: str, *arguments: str) -> list[str]:
    """Return the command of a new Python process that runs our code and never imports it from the user's folders.

    Args:
        code: the Python code that it runs. Its arguments are in `sys.argv[1:]`.
        arguments: the arguments.

    Example:
        subprocess.Popen(new_python("from executors.store.link import main; main()", url))
    """
    users = {*user_folders()}
    paths = [os.path.abspath(entry) for entry in sys.path]  # '' means the present directory
    # Our folder is the last one, because the user's folder may contain this project, as in a checkout of it.
    paths = [*(path for path in paths if os.path.realpath(path) not in users), ROOT]
    return [sys.executable, "-P", "-c", SET_PATHS + code, str(len(paths)), *paths, *arguments]


def _is_users(entry: str) -> bool:
    return os.path.realpath(entry) in _user_folders


def describe_hidden(file: Path) -> str | None:
    """Return a warning if a file imports a module of the user that has a reserved name. None: there is no such import.

    The imports are followed to files in the same folder. No code is run.

    Args:
        file: the user's file that is loaded or run.
    """
    folder, pending, seen = file.parent, [file], {file}
    while pending and len(seen) <= MAX_FILES:
        source = pending.pop(0)
        for name in _imports_of(source):
            beside = next((each for each in _candidates(folder, name) if each.is_file()), None)
            if beside is None or beside in seen:
                continue
            if name in RESERVED:
                owner = "Python's own module" if name in sys.stdlib_module_names else "the installed package"
                return (
                    f"{source.name} imports {name!r}. In a replica, that is {owner}, and not your "
                    f"{beside.relative_to(folder)}: rename your file if you want to import it."
                )
            seen.add(beside)
            pending.append(beside)
    return None


def _candidates(folder: Path, name: str) -> tuple[Path, ...]:
    return folder / name / "__init__.py", folder / f"{name}.py"


def _imports_of(file: Path) -> list[str]:
    """Return the top-level names that a file imports, in order. The list is empty if the file cannot be parsed."""
    import ast  # only here, because most commands do not need it

    found: dict[str, None] = {}
    with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
        if file.stat().st_size > MAX_BYTES:
            return []
        data = file.read_bytes()
        with PARSING:
            tree = ast.parse(data)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= dict.fromkeys(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found[node.module.partition(".")[0]] = None
    return list(found)
