"""Finds the reason why a command failed in its output: a traceback of Python, and the report of torchrun.

Most scripts that torchrun starts do not mark their main function with `record`. Then only their output has the error.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

from executors.process import signal_name
from executors.worker.failure import GENERATED, is_users_file, shown_place

HEAD = "Traceback (most recent call last):"
TORCHRUN_REPORT = "torch/distributed/elastic/multiprocessing/api.py"
ROOT_CAUSE = "Root Cause (first observed failure):"
# torch puts "[rank1]: " before each line of a traceback in a process group, and torchrun --tee puts "[default1]:".
PREFIX = re.compile(r"\[\w+\]: ?")
ERROR = re.compile(r"[A-Za-z_][\w.]*(?:: |:?$)")
FRAME = re.compile(r'\s*File "(?P<file>[^"\n]+)", line (?P<line>\d+)')
RANK = re.compile(r"^\s*rank\s*: (\d+)", re.M)
EXIT_CODE = re.compile(r"^\s*exitcode\s*: (-?\d+)", re.M)
MAX_TRACEBACK_LINES = 500
# The errors of a launcher that reports the failure of its process.
OF_LAUNCHERS = re.compile(r"(?:\w+\.)*(?:ChildFailedError|CalledProcessError|SignalException)\b")
# The errors of a process whose sibling has ended before it.
OF_SIBLINGS = re.compile(r"(?i)(closed|reset) by peer|broken pipe|remote process exited|connection was closed")


def before_report(printed: str) -> str:
    """Return the output before the report of torchrun, which has a traceback of torchrun and a table without a reason.

    Args:
        printed: the end of the output of a command.

    Example:
        before_report("ValueError: no luck\\nE1127 torch/distributed/elastic/multiprocessing/api.py:1002] failed")
    """
    before, report, _ = printed.partition(TORCHRUN_REPORT)
    return before.rpartition("\n")[0] if report else printed


def printed_traceback(printed: str) -> str | None:
    """Return the traceback that explains a failure. None: there is none.

    If several processes printed a traceback, it is the last one that is not the consequence of another process's end.

    Args:
        printed: the end of the output of a command, as far as its own processes wrote it.

    Example:
        printed_traceback("Traceback (most recent call last):\\n  File …\\nValueError: no luck\\n")
    """
    found = [each for each in _tracebacks(printed) if not OF_LAUNCHERS.match(_last_line(each))]
    causes = [each for each in found if not OF_SIBLINGS.search(_last_line(each))]
    return (causes or found)[-1] if found else None


def _tracebacks(printed: str) -> Iterator[str]:
    lines = printed.splitlines()
    for number, line in enumerate(lines):
        prefix = match[0] if (match := PREFIX.match(line)) else ""
        if line[len(prefix) :].rstrip() != HEAD:
            continue
        taken = [HEAD]
        for other in lines[number + 1 : number + MAX_TRACEBACK_LINES]:
            # Lines of other processes may stand between the lines of this traceback.
            if not other.startswith(prefix.rstrip()) or (not prefix and PREFIX.match(other)):
                continue
            text = other[len(prefix) :]
            if text.rstrip() == HEAD:
                break
            if not text.strip() or text[0].isspace():
                taken.append(text.rstrip())
            elif ERROR.match(text):
                yield "\n".join([*taken, text.rstrip()])
                break


def place_in(traceback: str) -> str | None:
    """Return the file and the line of the user's innermost frame in a printed traceback. None: it has none.

    Args:
        traceback: the text of the traceback.

    Example:
        place_in('Traceback (most recent call last):\\n  File "train.py", line 7\\nValueError: x')  # "train.py:7"
    """
    frames = [match for line in traceback.splitlines() if (match := FRAME.match(line))]
    users = [match for match in frames if is_users_file(match["file"])]
    # Libraries make functions from texts, such as the `__init__` of a dataclass. A file of the user says more.
    users = [match for match in users if match["file"] != GENERATED] or users
    return shown_place(users[-1]["file"], int(users[-1]["line"])) if users else None


def _last_line(traceback: str) -> str:
    return traceback.rpartition("\n")[2]


def root_cause(printed: str) -> str | None:
    """Return a sentence on the process that failed first, if torchrun reports that a signal ended it. None otherwise.

    Without this sentence, the error of a sibling would be shown, which lost its connection to the process.

    Args:
        printed: the end of the output of a command.

    Example:
        root_cause(output)  # "Its process with RANK 1 was ended by signal 9 (SIGKILL)."
    """
    _, found, table = printed.rpartition(ROOT_CAUSE)
    rank, code = RANK.search(table), EXIT_CODE.search(table)
    if not found or rank is None or code is None or int(code[1]) >= 0:
        return None
    number = -int(code[1])
    if number == signal.SIGABRT:  # a library aborts a process after an error that it has printed
        return None
    return f"Its process with RANK {rank[1]} was ended by signal {number} ({signal_name(number)})."
