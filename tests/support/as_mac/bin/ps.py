"""Acts macOS's ps(1), of which it takes: ps -ax|-p PID, and one -o for each column."""

from __future__ import annotations

import os
import sys
import time


def of_status(pid: str, name: str) -> str:
    """Return the first word of a line of the process's status."""
    with open(f"{PROC}/{pid}/status", errors="replace") as file:
        return next(line.split()[1] for line in file if line.startswith(f"{name}:"))


def column(name: str, pid: str, stat: list[str], began: float) -> str:
    """Return a column of a process, by the name that macOS gives it."""
    match name:
        case "sigignore=":
            return of_status(pid, "SigIgn")
        case "pid=":
            return pid
        case "ppid=":
            return stat[1]
        case "stat=":
            is_traced = of_status(pid, "TracerPid") != "0"
            return {"D": "U", "t": "T"}.get(stat[0], stat[0]) + "X" * is_traced
        case "lstart=":
            return time.strftime("%a %b %e %H:%M:%S %Y", time.localtime(began))
    sys.exit(f"ps: unknown column {name}")


PROC, arguments = os.environ["AS_MAC_PROC"], sys.argv[1:]
pids: list[str] = []
columns: list[str] = []
while arguments:
    match arguments:
        case ["-ax", *arguments]:
            pids = [name for name in os.listdir(PROC) if name.isdigit()]
        case ["-p", pid, *arguments]:
            pids = [pid]
        case ["-o", name, *arguments]:
            columns.append(name)
        case _:
            sys.exit(f"ps: illegal option -- {arguments[0]}")
with open(f"{PROC}/stat") as file:
    booted = next(int(line.split()[1]) for line in file if line.startswith("btime "))
is_found = False
for pid in pids:
    try:
        with open(f"{PROC}/{pid}/stat", errors="replace") as file:
            stat = file.read().rpartition(")")[2].split()
    except OSError:
        continue
    is_found = True
    began = booted + int(stat[19]) // os.sysconf("SC_CLK_TCK")
    print(*(column(name, pid, stat, began) for name in columns))
sys.exit(not is_found)
