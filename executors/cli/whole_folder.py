"""A folder that a command fills as a whole or not at all, also where the command is killed."""

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
from executors.report.words import name_moment

PREFIX = ".replicas-collect-"
SCRATCH = re.compile(
    re.escape(PREFIX) + r"(?P<machine>[0-9a-f]{8})-(?P<pid>[1-9][0-9]{0,9})-(?P<started>[0-9]{1,20})-\w+"
)
INCOMPLETE = "INCOMPLETE.txt"
ADVICE = """\
`replicas collect {run_id}` began at {at} to move the files below into this folder, the last one last.
If no such command runs any more, it was killed in between: some of these files may be of an earlier collection.
Run `replicas collect {run_id} --out …` again for this folder. It deletes this file when all files are in place.

{files}
"""


@contextlib.contextmanager
def whole_folder(out: Path, run_id: str, *, last: str) -> Iterator[Path]:
    """Give a temporary folder. What it holds when the block ends is moved to `out`; after an error nothing is.

    Files of the same names are replaced in an `out` that exists. While that goes on, `INCOMPLETE.txt` in there says so,
    and stays where the command is killed in between. Temporary folders of killed commands are deleted by the next one.

    Args:
        out: the folder, which may be missing.
        run_id: the run whose files these are, for that text.
        last: the file to move last, by its name in the folder. It is whole where the others are.

    Raises:
        UsageProblem: the folder cannot be made.
        OSError: a file cannot be written, or something is in its way.
    """
    named, out = out, out.absolute()
    try:
        if out.exists() and not out.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is a file")
        out.parent.mkdir(parents=True, exist_ok=True)
        for folder in (out, out.parent):
            _sweep(folder)
        # In the folder if there is one: it may be another disk than the folder above it.
        scratch = tempfile.mkdtemp(prefix=_own_prefix(), dir=out if out.exists() else out.parent)
    except OSError as error:
        raise_write_error(named, error)
    try:
        new = Path(scratch, "new")
        new.mkdir()
        try:
            yield new
        except OSError as error:  # named by where it would have been
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
    """Delete the temporary folders of processes of this machine that have ended; those of others are left alone."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{PREFIX}*"):
            found = SCRATCH.fullmatch(path.name)
            if found and found["machine"] == _machine() and not is_alive(int(found["pid"]), int(found["started"])):
                shutil.rmtree(path, ignore_errors=True)


def _move_into(out: Path, new: Path, run_id: str, last: str) -> None:
    """Move files into a folder that exists, over those of the same names; every name is checked before."""
    moves = [(path, out / path.relative_to(new)) for path in sorted(new.rglob("*")) if path.is_file()]
    for _, target in moves:
        folders = [folder for folder in target.parents if folder.is_relative_to(out) and os.path.lexists(folder)]
        if target.is_dir() or not all(folder.is_dir() for folder in folders):
            raise OSError(errno.EEXIST, "something else is in the way", str(target))
        if not target.parent.resolve().is_relative_to(out.resolve()):
            raise OSError(errno.ELOOP, "a symbolic link on the way leads out of the folder", str(target))
    moves.sort(key=lambda move: move[1] == out / last)
    files = "\n".join(str(target.relative_to(out)) for _, target in moves)
    note = new.parent / INCOMPLETE
    note.write_text(ADVICE.format(run_id=run_id, at=name_moment(time.time()), files=files))
    note.replace(out / INCOMPLETE)
    for path, target in moves:
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
    (out / INCOMPLETE).unlink()
