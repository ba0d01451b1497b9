"""Tests of stores and local runs on special file systems. `test_disks.py` runs each of them in a mount namespace.

Each function gets a path that does not exist, and mounts its file system there. A failed assertion ends the process
with exit code 1.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from executors import LocalProcessExecutor, Run, current_replica, launch, patience
from executors.errors import ReplicasError, StoreError, UnsafeStoreError
from executors.run.run import view_of
from executors.store import Store, open_store
from executors.testing import eventually
from support.processes import is_alive

MIB = 1 << 20
ADA, BOB = 54321, 54322


def mount(kind: str, where: Path, *options: str) -> None:
    where.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", kind, *options, "none", str(where)], check=True)


def files_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def refused(act: Callable[[], object], *words: str) -> StoreError:
    """Call a function that must fail, check the message of its error, and return the error."""
    with pytest.raises(StoreError) as caught:
        act()
    assert not isinstance(caught.value, UnsafeStoreError)
    assert isinstance(caught.value.__cause__, OSError)
    for word in words:
        assert word in str(caught.value)
    return caught.value


def fill_and_recover(store: Store, root: Path, words: str) -> None:
    """Writes that do not fit leave the older object and no other file. When there is space, writes work again."""
    too_much = [b"x" * MIB] * 64
    store.put("runs/kept", b"old")
    for act in (lambda: store.put("runs/new", too_much), lambda: store.put_if_absent("runs/new", too_much)):
        error = refused(act, "'runs/new'", words)
        assert (error.key, error.url) == ("runs/new", store.url)
    refused(lambda: store.put("runs/kept", too_much), words)
    assert bytes(store.get("runs/kept")) == b"old"
    assert [entry.key for entry in store.list("")] == ["runs/kept"]
    assert files_below(root) == ["runs/kept"]
    assert store.put_if_absent("runs/new", bytes(2 * MIB)), "the space is free again, and so is the key"


def full_disk(root: Path) -> None:
    mount("tmpfs", root, "-o", "size=8m")
    fill_and_recover(open_store(root), root, "No space left on device")


def full_disk_without_anonymous_files(root: Path) -> None:
    del os.O_TMPFILE
    full_disk(root)


def out_of_inodes(root: Path) -> None:
    mount("tmpfs", root, "-o", "nr_inodes=12")
    store = open_store(root)
    written: list[str] = []

    def write_small_ones() -> None:
        for index in range(20):
            store.put(f"{index}/x", b"")
            written.append(f"{index}/x")

    refused(write_small_ones, "No space left on device")
    assert len(written) > 1
    assert sorted(entry.key for entry in store.list("")) == sorted(written) == files_below(root)


def full_from_the_start(root: Path) -> None:
    mount("tmpfs", root, "-o", "nr_inodes=1")
    refused(lambda: open_store(root).put("a", b"x"), "No space left on device")


def file_size_limit(root: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * MIB, 8 * MIB))
    fill_and_recover(open_store(root), root, "File too large")


def no_hard_links(root: Path) -> None:
    mount("mqueue", root)  # the only file system of every Linux that can create files but cannot link them
    for place in (root, str(root), root.as_uri()):
        with pytest.raises(UnsafeStoreError) as caught:
            open_store(place)
        assert str(root) in str(caught.value)
        assert caught.value.url == root.as_uri()
    assert list(root.iterdir()) == [], "the probe left something"


def read_only(root: Path) -> None:
    mount("tmpfs", root)
    open_store(root).put("runs/a", b"x" * MIB)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(root)], check=True)
    store = open_store(root)
    assert bytes(store.get("runs/a")) == b"x" * MIB
    assert [entry.key for entry in store.list("")] == ["runs/a"]
    assert store.put_if_absent("runs/a", b"y") is False
    refused(lambda: store.put("runs/a", b"y"), "'runs/a'", "Read-only file system")
    refused(lambda: store.put_if_absent("b", b"y"), "'b'", "Read-only file system")
    refused(lambda: store.delete("runs/a"), "'runs/a'", "Read-only file system")
    refused(lambda: open_store(root / "below"), (root / "below").as_uri(), "Read-only file system")


def of_another_user(root: Path) -> None:
    """Use a store without root's rights, in a directory that another user owns and shares with a group."""
    root.mkdir()
    root.chmod(0o775)
    open_store(root).put("runs/a", b"x")
    (root / "runs/secret").write_bytes(b"x")
    (root / "runs/secret").chmod(0)
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    store = open_store(root)
    assert bytes(store.get("runs/a")) == b"x"
    refused(lambda: store.put("b", b"y"), "'b'", "Permission denied")
    refused(lambda: store.put_if_absent("runs/b", b"y"), "'runs/b'", "Permission denied")
    refused(lambda: store.delete("runs/a"), "'runs/a'", "Permission denied")
    refused(lambda: store.get("runs/secret"), "'runs/secret'", "Permission denied")


def two_users_in_turn(root: Path) -> None:
    """One user trains, and the other launches and reads, in a directory where both may create folders."""
    root.mkdir()
    root.chmod(0o1777)
    os.umask(0o022)
    training = open_store(root)
    turns: list[tuple[int, Callable[[], object]]] = [
        (ADA, lambda: training.put("ada/heartbeat", b"1")),
        (BOB, lambda: open_store(root).put("bob/task", b"1")),
        (ADA, lambda: open_store(root).put("ada/heartbeat", b"2")),
        (BOB, lambda: open_store(root).put("bob/task", b"2")),
        (ADA, lambda: training.put("ada/heartbeat", b"3")),
        (BOB, lambda: refused(lambda: open_store(root).put("ada/heartbeat", b"forged"), "Permission denied")),
    ]
    for user, act in turns:
        as_user(user, act)
    found = {entry.key: bytes(training.get(entry.key)) for entry in training.list("")}
    assert found == {"ada/heartbeat": b"3", "bob/task": b"2"}
    assert (root / "ada").stat().st_uid == ADA
    assert (root / "bob").stat().st_uid == BOB


def two_users_in_turn_without_anonymous_files(root: Path) -> None:
    del os.O_TMPFILE
    two_users_in_turn(root)


def as_user(user: int, act: Callable[[], object]) -> None:
    """Call a function in a process without root's rights."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            act()
            code = 0
        except BaseException:  # noqa: BLE001 - this process ends here
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


LOCAL = LocalProcessExecutor(preload=(), term_grace_s=0.5)


def fill(folder: str) -> str:
    """Write until the disk is full."""
    path = os.path.join(folder, "junk")
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for size in (1 << 16, 1 << 12, 1):
        try:
            while True:
                os.write(descriptor, bytes(size))
        except OSError:
            continue
    os.close(descriptor)
    print("filled", flush=True)
    return "the result"


def launch_and_fill(root: Path, executor: LocalProcessExecutor = LOCAL) -> Run:
    mount("tmpfs", root, "-o", "size=1m")
    return launch(executor, fill, 1, args={"folder": str(root)}, rendezvous=str(root))


def full_for_a_while(root: Path) -> None:
    """A full disk gets free space in time."""
    run = launch_and_fill(root)
    eventually(lambda: "filled" in run.logs(rank=0))
    (root / "junk").unlink()
    assert run.results() == ["the result"]


def full_for_good(root: Path) -> None:
    """A full disk never gets free space. After all time limits an error reports it, and no process is left."""
    os.environ["REPLICAS_TEST_PATIENCE"] = str(5.0 / patience.SUPERVISOR.seconds)
    run = launch_and_fill(root, LocalProcessExecutor(preload=("support.short_waits",), term_grace_s=0.5))
    supervisor = run.handles[0].metadata["supervisor_pid"]
    eventually(lambda: not is_alive(supervisor), "the supervisor gives up")
    with pytest.raises(ReplicasError, match="No space left on device"):
        run.results()
    run.remove()
    assert list(view_of(run).store.list(f"{run.run_id}/")) == [], "a run can be removed from a full disk"


def full_before_a_launch(root: Path) -> None:
    """Nothing is started when the run cannot be written."""
    mount("tmpfs", root, "-o", "size=1m")
    fill(str(root))
    with pytest.raises(StoreError, match="No space left on device"):
        launch(LOCAL, fill, 1, args={"folder": str(root)}, rendezvous=str(root))


def full_while_a_rank_dies(root: Path) -> None:
    """A detached run loses a rank while its disk is full.

    When there is space, the rank is started again, exactly once.
    """
    mount("tmpfs", root, "-o", "size=1m")
    executor = LocalProcessExecutor(preload=("support.short_waits",), term_grace_s=0.5)

    def entrypoint(folder: str) -> int:
        attempt = current_replica().attempt
        if attempt == 0:
            fill(folder)
            os.kill(os.getpid(), signal.SIGKILL)
        return attempt

    args = {"folder": str(root)}
    run = launch(executor, entrypoint, 1, args=args, restarts="1", detach=True, rendezvous=str(root))
    former_wait = re.compile(r"the supervisor: waiting for .*, 1[2-9] s so far.*No space left on device")
    eventually(
        lambda: former_wait.search(run.logs(rank=0)), "the supervisor has waited for more than ten seconds", within_s=90
    )
    (root / "junk").unlink()
    assert run.results() == [1]


def full_logs(root: Path) -> None:
    """The disk with the logs is full. A replica that prints continues, and its log later shows how much was lost."""
    mount("tmpfs", root, "-o", "size=1m")
    os.environ["XDG_STATE_HOME"] = str(root)
    store = root.with_name("store")

    def talk(junk: str) -> str:
        for _ in range(200):
            print("x" * 10_000)
        os.unlink(junk)
        print("the last line")
        return "the result"

    (root / "junk").write_bytes(bytes(MIB // 4))
    run = launch(LOCAL, talk, 1, args={"junk": str(root / "junk")}, rendezvous=str(store))
    assert run.results() == ["the result"]
    assert re.search(
        r"x\nreplicas: \d+ bytes of output were lost: the disk was full\nthe last line\n$", run.logs(rank=0)
    )


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
