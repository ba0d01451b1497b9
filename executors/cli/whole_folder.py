"""Fills a folder completely or not at all, even if the command is killed."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from executors.cli.output import raise_write_error
from executors.process import is_alive, start_time, this_machine
from executors.view.report.text import name_moment

PREFIX = ".replicas-collect-"
SCRATCH = re.compile(
    re.escape(PREFIX) + r"(?P<machine>[0-9a-f]{8})-(?P<pid>[1-9][0-9]{0,9})-(?P<started>[0-9]{1,20})-\w+"
)
INCOMPLETE = "INCOMPLETE.txt"
ADVICE = """\
`replicas collect {run_id}` began at {at} to move the files below into this folder, in this order.
If this command does not run any more, it was killed. Some of these files may then be from an earlier collection.
Run `replicas collect {run_id} --out …` again for this folder. The command deletes this file when all files are here.

{files}
"""


@contextlib.contextmanager
def whole_folder(out: Path, run_id: str, *, last: str) -> Iterator[Path]:
    """Yield a temporary folder, and move its content to `out` when the block ends. After an error nothing is moved.

    Files of the same names are replaced if `out` exists. While files are moved, `out` has an `INCOMPLETE.txt`, which
    remains if the command is killed. The next command deletes the temporary folders of killed commands.

    Args:
        out: the folder. It may be missing.
        run_id: the run that the files are from, for the text of `INCOMPLETE.txt`.
        last: the name of the file to move last. If that file exists, all other files exist, too.

    Raises:
        UsageProblem: the folder cannot be made.
        OSError: a file cannot be written, or another file is at its path.

    Example:
        with whole_folder(Path("results"), run.run_id, last="results.json") as folder:
            (folder / "results.json").write_text("{}")
    """
    named, out = out, out.absolute()
    try:
        if out.exists() and not out.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is a file")
        out.parent.mkdir(parents=True, exist_ok=True)
        for folder in (out, out.parent):
            _sweep(folder)
        # The temporary folder is inside an existing `out`, because `out` may be on another disk than its parent.
        scratch = tempfile.mkdtemp(prefix=_own_prefix(), dir=out if out.exists() else out.parent)
    except OSError as error:
        raise_write_error(named, error)
    try:
        new = Path(scratch, "new")
        new.mkdir()
        try:
            yield new
        except OSError as error:  # the error must name the final path, because the user does not know the temporary one
            if isinstance(error.filename, str):
                error.filename = error.filename.replace(str(new), str(out))
            raise
        if out.exists():
            _move_into(out, new, run_id, last)
        else:
            new.rename(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _own_prefix() -> str:
    return f"{PREFIX}{_machine()}-{os.getpid()}-{start_time(os.getpid()) or 0}-"


def _machine() -> str:
    return blake2b(this_machine().encode(), digest_size=4).hexdigest()


def _sweep(folder: Path) -> None:
    """Delete temporary folders whose process was on this machine and has ended. Other machines may share the disk."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{PREFIX}*"):
            found = SCRATCH.fullmatch(path.name)
            if found and found["machine"] == _machine() and not is_alive(int(found["pid"]), int(found["started"])):
                shutil.rmtree(path, ignore_errors=True)


def _move_into(out: Path, new: Path, run_id: str, last: str) -> None:
    """Move files into an existing folder, over files of the same names. All paths are checked before the first move."""
    moves = [(path, out / path.relative_to(new)) for path in sorted(new.rglob("*")) if path.is_file()]
    for _, target in moves:
        folders = [folder for folder in target.parents if folder.is_relative_to(out) and os.path.lexists(folder)]
        if target.is_dir() or not all(folder.is_dir() for folder in folders):
            raise OSError(errno.EEXIST, "a file or folder of another kind is at this path", str(target))
        if not target.parent.resolve().is_relative_to(out.resolve()):
            raise OSError(errno.ELOOP, "a symbolic link in this path leads out of the folder", str(target))
    moves.sort(key=lambda move: move[1] == out / last)
    files = "\n".join(str(target.relative_to(out)) for _, target in moves)
    note = new.parent / INCOMPLETE
    note.write_text(ADVICE.format(run_id=run_id, at=name_moment(time.time()), files=files))
    note.replace(out / INCOMPLETE)
    for path, target in moves:
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
    (out / INCOMPLETE).unlink()
