"""Tests the snapshot of a workspace: the files that git would track, and equal bytes for equal files."""

from __future__ import annotations

import functools
import io
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support.git import git, repository
from support.new_runs import create_run
from support.records import read_json

from executors.errors import EntrypointError
from executors.shipping.package import make_package
from executors.shipping.workspace import snapshot_workspace
from executors.store import MemoryStore
from executors.task.code_package import Package

NOBODY = 65534
KEY = "-----BEGIN PRIVATE KEY-----\nAAAA\n"


def write(folder: Path, **files: str) -> None:
    """Write files; `__` in a name stands for a slash, `_dot_` for a dot."""
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one commit."""
    folder = tmp_path / "work space"
    return repository(folder, {"train.py": "x = 1", "pkg/mod.py": "", ".gitignore": "ignored.txt\n/data/\n"})


def unpacked(package: Package) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(package.archive)) as archive:
        return {member.name: member for member in archive}


def content(package: Package, name: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(package.archive)) as archive:
        file = archive.extractfile(f"workspace/{name}")
        assert file is not None
        return file.read()


# Files in the snapshot


def test_only_files_that_git_tracks_or_would_track_are_in_the_snapshot(root: Path) -> None:
    write(root, new_dot_py="", ignored_dot_txt="", data__big="", pkg__ignored_dot_txt="")
    workspace = snapshot_workspace(root)
    assert workspace.files == (".gitignore", "new.py", "pkg/mod.py", "train.py")
    assert [name for name in unpacked(workspace) if name.startswith("workspace/")] == [
        f"workspace/{name}" for name in workspace.files
    ]
    assert (workspace.n_files, workspace.left_out) == (4, ())
    assert workspace.size_bytes == sum((root / name).stat().st_size for name in workspace.files)
    (root / "train.py").unlink()
    assert snapshot_workspace(root).files == (".gitignore", "new.py", "pkg/mod.py"), (
        "the snapshot has the file that git still tracks"
    )


def test_a_folder_of_a_repository_is_a_workspace_of_its_own(root: Path) -> None:
    workspace = snapshot_workspace(root / "pkg")
    assert workspace.files == ("mod.py",)
    assert workspace.commit == git(root, "rev-parse", "HEAD")


def test_both_our_packages_travel_whole_and_without_caches(root: Path) -> None:
    names = set(unpacked(snapshot_workspace(root)))
    project = Path(__file__).parents[3]
    ours = {
        path.relative_to(project) for package in ("executors", "diloco") for path in (project / package).rglob("*.py")
    }
    assert {f"packages/{path.as_posix()}" for path in ours} <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_without_a_repository_hidden_files_caches_and_environments_are_not_packed(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    write(folder, a_dot_py="", sub__b_dot_py="", _dot_hidden__c="", _dot_rc="")
    write(folder, my_env__pyvenv_dot_cfg="", my_env__lib__e_dot_py="", node_modules__f_dot_js="")
    (folder / "sub" / "__pycache__").mkdir()
    (folder / "sub" / "__pycache__" / "d.pyc").touch()
    (folder / "linked").symlink_to("sub")
    workspace = snapshot_workspace(folder)
    assert workspace.files == ("a.py", "linked/b.py", "sub/b.py")
    assert (workspace.commit, workspace.dirty) == (None, None)


def test_without_git_only_hidden_files_are_not_packed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    workspace = snapshot_workspace(root)
    assert (workspace.files, workspace.commit, workspace.dirty) == (("pkg/mod.py", "train.py"), None, None)


def test_a_folder_that_the_repository_around_it_ignores_is_taken_as_a_plain_one(root: Path) -> None:
    write(root, data__train_dot_py="")
    workspace = snapshot_workspace(root / "data")
    assert (workspace.files, workspace.commit, workspace.dirty) == (("train.py",), None, None)


def test_a_submodule_travels_and_one_that_is_not_checked_out_is_named(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write(other, lib_dot_py="", _dot_gitignore="skipped\n")
    git(other, "init", "--quiet")
    git(other, "add", ".")
    git(other, "commit", "--quiet", "--message", "first")
    for name in ("here", "absent"):
        git(root, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(other), name)
    git(root, "submodule", "--quiet", "deinit", "--force", "absent")
    write(root, here__skipped="", here__new_dot_py="")
    workspace = snapshot_workspace(root)
    assert {"here/lib.py", "here/new.py"} <= set(workspace.files)
    assert "here/skipped" not in workspace.files
    assert workspace.left_out == ("absent (a submodule that is not checked out)",)


def test_a_workspace_that_git_refuses_to_list_is_an_error(root: Path) -> None:
    (root / ".git" / "index").write_bytes(b"not an index")
    with pytest.raises(EntrypointError, match=r"cannot be listed. git printed: .*index"):
        snapshot_workspace(root)


def test_a_hook_of_git_may_launch(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert "train.py" in snapshot_workspace(root).files


# Links, odd names, modes


def test_links_inside_the_workspace_become_copies_of_their_targets_and_others_are_named(
    root: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("not ours")
    (root / "link.py").symlink_to("train.py")
    (root / "linked").symlink_to("pkg")
    (root / ".env").write_text("TOKEN=hunter2")
    (root / "settings").symlink_to(".env")
    (root / "away").symlink_to(outside)
    (root / "away.txt").symlink_to(outside / "secret")
    (root / "dangling").symlink_to("nowhere")
    (root / "loop").symlink_to(".")
    (root / "itself").symlink_to("itself")
    workspace = snapshot_workspace(root)
    assert content(workspace, "link.py") == b"x = 1"
    assert "loop/train.py" in workspace.files, "a link to the workspace itself is followed only once"
    assert "linked/mod.py" in workspace.files
    assert all(member.isreg() for member in unpacked(workspace).values())
    assert workspace.left_out == (
        ".env (it may hold a secret)",
        f"away (a link to {outside})",
        f"away.txt (a link to {outside}/secret)",
        "dangling (a link to nowhere)",
        "itself (a link to itself)",
        "loop/.env (it may hold a secret)",
        "settings (it may hold a secret)",
    )


def test_any_name_travels(root: Path) -> None:
    names = [
        "with space.py",
        "ä \N{OTTER}.txt",
        "new\nline",
        "quote'\".py",
        "-dash",
        "x" * 200,
        os.fsdecode(b"caf\xe9"),
    ]
    for name in names:
        (root / name).write_bytes(os.fsencode(name))
    package = snapshot_workspace(root)
    for name in names:
        assert name in package.files
        assert content(package, name) == os.fsencode(name), name


def test_modes_are_reduced_and_owners_and_times_are_nobodys(root: Path) -> None:
    (root / "run.sh").touch(mode=0o700)
    (root / "private").touch(mode=0o600)
    members = unpacked(snapshot_workspace(root))
    assert (members["workspace/run.sh"].mode, members["workspace/private"].mode) == (0o755, 0o644)
    assert {(made.mtime, made.uid, made.gid, made.uname, made.gname) for made in members.values()} == {
        (0, 0, 0, "", "")
    }


# Secrets


def test_files_that_may_have_a_secret_are_not_packed_and_are_named(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = {"cert.pem": "-----BEGIN CERTIFICATE-----\n", ".env.example": "TOKEN=", "notes.key": "C major"}
    secret = {
        ".env": "TOKEN=hunter2",
        "pkg/.env.prod": "",
        "id_ed25519": "",
        "tls.key": KEY,
        "a.pem": KEY,
    }
    for name, text in {**kept, **secret}.items():
        (root / name).write_text(text)
    git(root, "add", "--all")  # a secret is left out even if git tracks it
    workspace = snapshot_workspace(root)
    assert set(kept) <= set(workspace.files)
    assert not set(secret) & set(workspace.files)
    assert workspace.left_out == tuple(sorted(f"{name} (it may hold a secret)" for name in secret))
    make_package("train.py:main", root=root)
    assert capsys.readouterr().err == f"replicas: not sent to the replicas: {', '.join(workspace.left_out)}\n"


# The same bytes


def test_equal_files_give_an_equal_digest_wherever_and_whenever(root: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for name in ("train.py", "pkg/mod.py"):  # in another order, at another time, with another umask
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text((root / name).read_text())
        os.utime(copy / name, (1, 1))
        os.chmod(copy / name, 0o640)
    (root / ".gitignore").unlink()
    assert snapshot_workspace(root).sha256 == snapshot_workspace(copy).sha256
    (copy / "train.py").write_text("x = 2")
    assert snapshot_workspace(root).sha256 != snapshot_workspace(copy).sha256


def test_the_commit_is_recorded_and_whether_the_files_differ_from_it(root: Path, tmp_path: Path) -> None:
    clean = snapshot_workspace(root)
    assert (clean.commit, clean.dirty) == (git(root, "rev-parse", "HEAD"), False)
    (root / "train.py").write_text("x = 2")
    assert snapshot_workspace(root).dirty is True
    other = tmp_path / "without a commit"
    write(other, a_dot_py="")
    git(other, "init", "--quiet")
    package = snapshot_workspace(other)
    assert (package.files, package.commit, package.dirty) == (("a.py",), None, None)


# Refused workspaces


def test_a_workspace_that_is_too_large_is_refused_with_its_largest_files_and_a_remedy(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.shipping.workspace.LIMIT_BYTES", 1 << 20)
    for number in range(7):
        (root / f"file{number}.bin").write_bytes(bytes(number * 200_000))
    with pytest.raises(EntrypointError) as caught:
        snapshot_workspace(root)
    text = str(caught.value)
    assert text.startswith("The workspace has 4.0 MiB, and at most 1.0 MiB are sent to replicas.")
    assert "Largest: file6.bin (1.1 MiB), file5.bin (1.0 MiB)," in text
    assert "file2.bin" in text
    assert "file1.bin" not in text
    assert ".gitignore" in text


@pytest.mark.parametrize("locked", ["train.py", "tls.key", "pkg"])
def test_a_file_that_cannot_be_read_is_named(root: Path, monkeypatch: pytest.MonkeyPatch, locked: str) -> None:
    (root / "tls.key").write_text(KEY)
    settings = {
        "CONFIG_GLOBAL": os.devnull,
        "CONFIG_COUNT": "1",
        "CONFIG_KEY_0": "safe.directory",
        "CONFIG_VALUE_0": "*",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"GIT_{name}", value)
    # Other users cannot enter the folders of pytest.
    root = shutil.copytree(root, Path(tempfile.mkdtemp()) / "work")
    root.parent.chmod(0o755)
    snapshot_workspace(root)  # before seteuid, so that all imports are done
    (root / locked).chmod(0)
    if is_root := os.geteuid() == 0:  # root can read every file
        os.seteuid(NOBODY)
    try:
        with pytest.raises(EntrypointError, match=rf"cannot be packed.*Permission denied.*{locked}"):
            snapshot_workspace(root)
    finally:
        os.seteuid(0) if is_root else None
        (root / locked).chmod(0o755)
        shutil.rmtree(root.parent)


def test_a_folder_of_another_user_is_left_out_and_named_without_git(tmp_path: Path) -> None:
    root = Path(tempfile.mkdtemp())
    write(root, train_dot_py="", theirs__data_dot_bin="")
    root.chmod(0o755)
    snapshot_workspace(root)
    (root / "theirs").chmod(0)
    if is_root := os.geteuid() == 0:
        os.seteuid(NOBODY)
    try:
        package = snapshot_workspace(root)
    finally:
        os.seteuid(0) if is_root else None
        (root / "theirs").chmod(0o755)
        shutil.rmtree(root)
    assert (package.files, package.left_out) == (("train.py",), ("theirs (it cannot be read)",))


def test_an_entrypoint_that_replicas_would_not_find_is_refused(root: Path) -> None:
    write(root, data__train_dot_py="")
    for entrypoint, message in {
        "ignored.txt/../data/train.py:main": "git ignores 'data/train.py'",
        "data/train.py:main": "git ignores 'data/train.py'",
        "../outside.py:main": "outside of the workspace",
        f"{root}/train.py:main": "Use train.py:main",
    }.items():
        with pytest.raises(EntrypointError) as caught:
            make_package(entrypoint, root=root)
        assert message in str(caught.value), entrypoint


def a_function_of_another_folder() -> None: ...


class OfAnotherFolder:
    def __call__(self) -> None: ...


def test_a_callable_that_replicas_could_not_import_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside: tuple[tuple[Callable[..., Any], str], ...] = (
        (a_function_of_another_folder, "a_function_of_another_folder"),
        (functools.partial(functools.partial(a_function_of_another_folder)), "a_function_of_another_folder"),
        (OfAnotherFolder(), "OfAnotherFolder"),
    )
    for entrypoint, name in outside:
        with pytest.raises(EntrypointError, match=rf"{name}' is in .*, outside of the workspace"):
            make_package(entrypoint, root=root)
    here = Path(__file__).parents[3]
    for travels, folder in (
        (a_function_of_another_folder, here),
        (lambda: None, root),
        (os.path.join, root),
        (make_package, root),
        (pytest.skip, root),
    ):
        make_package(travels, root=folder)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        for entrypoint, _ in outside:
            make_package(entrypoint, root=root)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules[__name__])  # like `__mp_main__` in children of "spawn"
    make_package(a_function_of_another_folder, root=root)


def test_folders_of_the_workspace_on_the_path_are_reported(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(root), str(root / "pkg"), str(root / "data"), "/usr/lib", *sys.path])
    assert make_package("train.py:main", root=root).paths == ("pkg",)


# The run's records


def test_the_record_and_the_task_of_a_run_name_its_code(root: Path) -> None:
    store = MemoryStore()
    package = make_package("train.py:main", root=root, pip=["attrs==1.0"])
    create_run(store, "r", "train.py:main", {}, 1, backend="cloud", package=package)
    task = read_json(store, "r/task/task.json")
    assert read_json(store, "r/run.json")["code"] == {
        "sha256": package.sha256,
        "size_bytes": package.size_bytes,
        "n_files": 3,
        "commit": git(root, "rev-parse", "HEAD"),
        "dirty": False,
    }
    assert bytes(store.get("r/task/code.tar.gz")) == package.archive
    assert task["code_sha256"] == package.sha256
    assert task["requirements"] == list(package.requirements)
    assert task["requirements"][-1] == "attrs==1.0"
    assert task["python_version"] == "{}.{}.{}".format(*sys.version_info)
    assert "+" not in task["torch"]


def test_the_task_is_written_after_the_code(root: Path) -> None:
    written: list[str] = []

    class Watched(MemoryStore):
        def put(self, key: str, data: object) -> None:
            written.append(key)
            super().put(key, data)  # type: ignore[arg-type]

    package = snapshot_workspace(root)
    create_run(Watched(), "r", lambda: None, {}, 1, backend="cloud", package=package)
    assert written == ["r/task/callable.pkl", "r/task/code.tar.gz", "r/task/task.json"]
