"""The rules of the architecture: which files may import which, the cost of imports, and the names of records.

Each rule has one test, which lists all files that break the rule.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from support.floors import FLOORS

from executors import process
from executors.store import record_names

ROOT = Path(__file__).parents[2]
DILOCO_USES = (
    *("executors.store", "executors.replica", "executors.errors", "executors.attempt", "executors.patience"),
    "executors.process",  # the one folder that knows operating systems has memory that processes share
)
SDKS = {
    "modal": "executors/backends/modal*.py",
    "huggingface_hub": "executors/backends/hf_*.py",
    "boto3": "executors/store/s3/*.py",
    "botocore": "executors/store/s3/*.py",
    "starlette": "executors/dashboard/*.py",
    "uvicorn": "executors/dashboard/*.py",
    "tensorboard": "executors/view/report/tensorboard.py",
    "trackio": "executors/view/report/trackers/trackio.py",
    "wandb": "executors/view/report/trackers/wandb.py",
    "mlflow": "executors/view/report/trackers/mlflow.py",
}
STANDS_ALONE = "executors/shipping/bootstrap.py"  # this file runs before our packages are installed
RUN_WITHOUT_US = (STANDS_ALONE, "executors/shipping/install_progress.py")
PROCESS_NAMES = process.__all__
SYSTEMS = "executors/process/"
"""The only folder that calls functions that some operating systems lack."""
OF_ONE_SYSTEM = (
    *("sys.platform", "platform.system", "os.uname", "os.name"),
    *("os.pipe2", "os.pidfd_open", "signal.pidfd_send_signal", "os.memfd_create", "os.sched_getaffinity"),
    *("os.O_TMPFILE", "os.O_DIRECT", "os.eventfd", "os.posix_fadvise", "os.copy_file_range", "os.splice"),
    *("os.getxattr", "os.setxattr", "os.waitid", "os.setns", "os.unshare", "os.getrandom", "os.fdatasync"),
    *("signal.SIGRTMIN", "signal.sigtimedwait", "signal.sigwaitinfo", "select.epoll", "select.kqueue"),
    *("socket.SO_PEERCRED", "socket.SOCK_CLOEXEC", "mmap.MAP_POPULATE", "resource.prlimit", "inotify_simple.INotify"),
)
OF_LINUX = ("/proc/", "/sys/fs/", "/dev/shm", "prctl")
SYSTEMS_ALLOWED = {
    ("executors/worker/probe.py", "platform.system"): "doctor prints the name of the system",
    (
        "executors/worker/chaos.py",
        "/sys/fs/",
    ): "`--chaos oom` needs root and control groups, and refuses other machines",
    ("executors/shipping/bootstrap.py", "/proc/"): "a script without imports of ours, which runs in a container",
    ("executors/backends/kubernetes_manifest.py", "/dev/shm"): "a path in a container",
}
TESTING = ("executors.testing", "diloco.testing")
REPEATED = ("__init__.py", "__main__.py", "errors.py", "executor.py", "protocol.py", "settings.py")
BORDER = ("executors.backend", "executors.registry.placements", "executors.registry.run_placements")
"""The files that make a backend from the user's executor, and return the executor. Only these files know kinds of
executors.
"""
KINDS_OF_EXECUTORS = re.compile(r"Backend|PlacedBackend|Placements|ServerlessExecutor|\w+(Backend|Placements|Executor)")
MAX_METHODS = 20
ROOMS_COUNTED = (
    *("attempt", "backends", "launcher", "logs", "metrics", "registry", "restarts", "run", "settings", "supervisor"),
    *("dashboard", "notices", "view", "worker"),
)
COUNTED = (
    "diloco",
    *(f"executors/{room}" for room in ROOMS_COUNTED),
)
COUNTED_FILES = ("executors.backend",)
MAX_PRIVATE_PARAMETERS = 7  # besides self
MAX_ENTRIES = 30  # of `ls executors`


def files_of(*packages: str) -> dict[str, Path]:
    """Return the files of packages by their dotted names."""
    found = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    return {name_of(path): path for path in found}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path, *, only_at_the_top: bool = False) -> frozenset[str]:
    """Return the modules that a file imports, as dotted names. Imports for the type checker count, and `from a import
    b` is a and a.b.
    """
    tree = tree_of(path)
    found: set[str] = set()
    for node in tree.body if only_at_the_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(str(node.module))
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def is_inside(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def arrows(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return for each file the other files that it imports."""
    found = {}
    for name, path in files.items():
        imported = set(imports_of(path) & files.keys())
        # `from a.b import c`, where a.b is a folder and c a file of it, is an import of the file alone.
        folders = {other for other in imported if files[other].name == "__init__.py"}
        whole = {folder for folder in folders if not any(is_inside(other, folder) for other in imported - {folder})}
        found[name] = (imported - folders) | whole
        found[name].discard(name)
    return found


def room_of(name: str) -> str:
    return [*name.split("."), ""][1]


def circle_in(graph: Mapping[str, Iterable[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("package", ["executors", "diloco"])
def test_no_files_import_each_other_in_a_circle(package: str) -> None:
    assert circle_in(arrows(files_of(package))) == []


@pytest.mark.parametrize("package", ["executors", "diloco"])
def test_no_rooms_import_each_other_in_a_circle(package: str) -> None:
    rooms: dict[str, set[str]] = {}
    for name, imported in arrows(files_of(package)).items():
        rooms.setdefault(room_of(name), set()).update({room_of(other) for other in imported} - {room_of(name)})
    assert circle_in(rooms) == []


def test_the_folder_executors_has_few_entries() -> None:
    # A checkout that moves between commits keeps empty folders, with nothing but caches in them.
    files = [path.relative_to(ROOT / "executors") for path in (ROOT / "executors").rglob("*.*")]
    entries = {path.parts[0] for path in files if "__pycache__" not in path.parts}
    assert len(entries) <= MAX_ENTRIES, sorted(entries)


def test_a_room_of_executors_imports_only_from_lower_floors() -> None:
    floor = {room: number for number, rooms in enumerate(FLOORS, start=1) for room in rooms}
    files = files_of("executors")
    assert {room_of(name) for name in files} <= floor.keys(), "a room is missing in the list of floors"
    assert [
        f"{name} imports {other}"
        for name, imported in arrows(files).items()
        for other in imported
        if room_of(other) != room_of(name) and floor[room_of(other)] >= floor[room_of(name)]
    ] == []


def test_executors_never_import_torch_or_diloco() -> None:
    files = files_of("executors")
    assert [
        name for name in files if any(is_inside(other, "torch", "diloco") for other in imports_of(files[name]))
    ] == []


def test_the_rendezvous_knows_no_torch() -> None:
    files = files_of("diloco/rendezvous")
    assert [name for name in files if any(is_inside(other, "torch") for other in imports_of(files[name]))] == []


def test_diloco_knows_of_executors_only_the_store_the_replica_the_errors_and_the_attempt() -> None:
    assert [
        f"{name} imports {other}"
        for name, path in files_of("diloco").items()
        for other in imports_of(path)
        if is_inside(other, "executors") and other != "executors" and not is_inside(other, *DILOCO_USES)
    ] == []


def test_no_backend_imports_another() -> None:
    def family(name: str) -> str:
        return name.split(".")[2].partition("_")[0]

    files = {name: path for name, path in files_of("executors/backends").items() if name.count(".") >= 2}
    assert [
        f"{name} imports {other}"
        for name, imported in arrows(files).items()
        for other in imported
        if family(other) not in (family(name), "jobs")
    ] == []


def test_outside_of_the_border_no_code_asks_for_the_kind_of_an_executor() -> None:
    """Code asks the backend a question instead of checking its type, such as `backend.starts_single_ranks`."""

    offenders = []
    for name, path in files_of("executors").items():
        for node in ast.walk(tree_of(path)):
            is_question = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass")
            if not isinstance(node, ast.Call) or not is_question or name in BORDER or is_inside(name, *TESTING):
                continue
            kinds = [getattr(each, "id", getattr(each, "attr", "")) for each in ast.walk(node.args[1])]
            offenders += [
                f"{name}:{node.lineno} asks for {kind}" for kind in kinds if KINDS_OF_EXECUTORS.fullmatch(kind)
            ]
    assert offenders == []


def test_one_flow_alone_starts_replicas() -> None:
    """Every start takes a lease, keeps handles and is undone in the same way, because all starts use
    `start_attempts`.
    """
    callers = {
        name
        for name, path in files_of("executors").items()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr == "start_ranks"
    }
    verbs = {name for name in callers if is_inside(name, "executors.backends")}  # `launch_replicas`, of a new run
    assert callers - verbs == {"executors.run.start_attempts", "executors.registry.placements"}


def test_an_sdk_is_imported_by_its_own_adapter_alone_and_lazily() -> None:
    offenders = []
    for name, path in files_of("executors", "diloco").items():
        for sdk, adapter in SDKS.items():
            is_at_home = path.relative_to(ROOT).match(adapter) or path.relative_to(ROOT).match(STANDS_ALONE)
            imported = imports_of(path, only_at_the_top=bool(is_at_home))
            offenders += [f"{name} imports {other}" for other in imported if is_inside(other, sdk)]
    assert offenders == []


def test_one_folder_alone_knows_operating_systems() -> None:
    found = set()
    for path in files_of("executors", "diloco").values():
        where = str(path.relative_to(ROOT))
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = f"{node.value.id}.{node.attr}"
                found |= {(where, name)} if name in OF_ONE_SYSTEM else set()
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
                found |= {(where, part) for part in OF_LINUX if node.value.startswith(part)}
    assert {each for each in found if not each[0].startswith(SYSTEMS)} <= SYSTEMS_ALLOWED.keys(), (
        "make the call in the file that the test names"
    )


def test_each_system_has_a_file_with_the_same_functions_and_facts() -> None:
    """A caller never asks which system it runs on: it calls a function, or asks for a fact such as `CAN_FORK`."""

    def offered(name: str) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for node in tree_of(ROOT / SYSTEMS / name).body:
            if isinstance(node, ast.FunctionDef):
                # The folders of Linux's control groups have defaults, which tests replace.
                found[node.name] = [each.arg for each in node.args.args if each.arg not in ("root", "own")]
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                found[getattr(target, "id", "_")] = []
        facade = {name for name in PROCESS_NAMES if name in found}
        return {name: parameters for name, parameters in found.items() if name in facade}

    linux = offered("linux.py") | offered("linux_activity.py")
    linux["take_sample"] = ["now", "ignored_threads"]
    assert linux == offered("macos.py")
    assert len(linux) > 50


def test_on_windows_importing_and_the_command_say_one_sentence() -> None:
    code = """
import sys
sys.platform = "win32"
sys.modules.update(resource=None, fcntl=None)  # which Windows lacks: an import is an ImportError
{}
"""
    for last in (
        "import executors",
        "from executors.cli import main",
        "import runpy; runpy.run_module('executors.cli')",
    ):
        command = [sys.executable, "-c", code.format(last)]
        told = subprocess.run(command, capture_output=True, text=True, check=False)
        sentence = "replicas runs on Linux and macOS. On Windows, use WSL 2.\n"
        assert (told.returncode, told.stdout, told.stderr) == (1, "", sentence)


def test_the_contract_suites_are_imported_by_tests_alone() -> None:
    assert [
        f"{name} imports {other}"
        for name, path in files_of("executors", "diloco").items()
        if not is_inside(name, *TESTING)
        for other in imports_of(path)
        if is_inside(other, *TESTING, "pytest")
    ] == []


def test_importing_executors_pulls_in_nothing_heavy() -> None:
    code = "import sys, json; import executors; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    heavy = {"torch", "diloco", "numpy", "asyncio", "rich", "typer", "importlib.metadata", "tenacity", *SDKS}
    assert heavy.isdisjoint(loaded)


def test_replicas_are_forked_from_a_process_without_hooks_for_it_but_those_of_random() -> None:
    code = """
import os
hooks = []
os.register_at_fork = lambda **hook: hooks.append(next(iter(hook.values())).__module__)
import executors.backends.local.zygote
print(*hooks)
"""
    hooks = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(hooks) <= {"random"}


@pytest.mark.parametrize(
    "package", ["executors", "executors.run.run", "executors.backends.local.executor", "executors.worker.main"]
)
def test_nothing_happens_at_import(package: str) -> None:
    code = f"""
import sys, logging, os
import executors.errors, tenacity, ctypes, cloudpickle, platformdirs  # other people's imports are not ours to judge
seen = []
def hook(event, arguments):
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    if writes or event.startswith(("socket.", "subprocess.", "os.mkdir", "os.fork", "os.putenv")):
        seen.append((event, str(arguments)))
sys.dont_write_bytecode = True
sys.addaudithook(hook)
before = list(logging.root.handlers)
import {package}
assert not seen, seen
assert logging.root.handlers == before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_basename_has_one_role() -> None:
    paths: dict[str, list[str]] = {}
    for name, path in files_of("executors", "diloco").items():
        if path.parent.name != "cli":  # a file there has the name of its verb
            paths.setdefault(path.name, []).append(name)
    assert {name: where for name, where in paths.items() if len(where) > 1 and name not in REPEATED} == {}


def test_private_functions_take_seven_values_at_most() -> None:
    """Four values that functions pass together become a class with a name."""
    offenders = []
    for name, path in files_of("executors", "diloco").items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("_") and not node.name.startswith("__"):
                n = len(node.args.args) + len(node.args.kwonlyargs)
                offenders += [f"{name}.{node.name} takes {n}"] if n > MAX_PRIVATE_PARAMETERS + 1 else []
    assert offenders == []


def test_the_name_of_a_record_is_written_in_one_file() -> None:
    """Code that needs a record calls a typed method, or takes the record's name from that file."""
    names = {name for name in vars(record_names).values() if isinstance(name, str) and name.endswith(".json")}
    assert {"run.json", "started.json", "outcome.json", "heartbeat.json", "handle.json", "intent.json"} <= names
    offenders = []
    for name, path in files_of("executors", "diloco").items():
        if name == record_names.__name__ or str(path.relative_to(ROOT)) in RUN_WITHOUT_US:
            continue
        tree = tree_of(path)
        texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
                written = node.value.rpartition("/")[2]
                offenders += [f"{name}:{node.lineno} writes {written!r}"] if written in names else []
    assert offenders == []


def test_a_class_has_20_methods_at_most_or_the_reason_beside_it() -> None:
    offenders = []
    counted = {name: path for name, path in files_of("executors").items() if name in COUNTED_FILES}
    for name, path in {**files_of(*COUNTED), **counted}.items():
        lines = path.read_text().splitlines()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                n = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                above = "".join(lines[max(0, first - 4) : first - 1])
                if n > MAX_METHODS and f"# More than {MAX_METHODS} methods: " not in above:
                    offenders.append(f"{name}.{node.name} has {n}")
    assert offenders == []


def test_the_folders_at_the_top_are_the_agreed_ones() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    allowed = {
        "pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt", ".gitignore", "CONTRIBUTING.md",
        "CHANGELOG.md", "CITATION.cff", "SECURITY.md",
        "executors", "diloco", "tests", "examples", "docs", "ADRs", ".ci", ".github",
    }  # fmt: skip
    assert {path.split("/")[0] for path in tracked} <= allowed
