"""Acts macOS's ps(1), of which it takes: ps -ax|-p PID, and one -o for each column."""

import os
import sys
import time


def is_traced(pid):
    with open(f"{proc}/{pid}/status", errors="replace") as file:
        return next(line.split()[1] != "0" for line in file if line.startswith("TracerPid:"))


def ignored(pid):
    with open(f"{proc}/{pid}/status", errors="replace") as file:
        return next(line.split()[1] for line in file if line.startswith("SigIgn:"))


COLUMNS = {
    "sigignore=": lambda pid, stat, began: ignored(pid),
    "pid=": lambda pid, stat, began: pid,
    "ppid=": lambda pid, stat, began: stat[1],
    "stat=": lambda pid, stat, began: {"D": "U", "t": "T"}.get(stat[0], stat[0]) + "X" * is_traced(pid),
    "lstart=": lambda pid, stat, began: time.strftime("%a %b %e %H:%M:%S %Y", time.localtime(began)),
}
proc, arguments = os.environ["AS_MAC_PROC"], sys.argv[1:]
pids, columns = None, []
while arguments:
    match arguments:
        case ["-ax", *arguments]:
            pids = [name for name in os.listdir(proc) if name.isdigit()]
        case ["-p", pid, *arguments]:
            pids = [pid]
        case ["-o", column, *arguments] if column in COLUMNS:
            columns.append(COLUMNS[column])
        case _:
            sys.exit(f"ps: illegal option -- {arguments[0]}")
with open(f"{proc}/stat") as file:
    booted = next(int(line.split()[1]) for line in file if line.startswith("btime "))
is_found = False
for pid in pids:
    try:
        with open(f"{proc}/{pid}/stat", errors="replace") as file:
            stat = file.read().rpartition(")")[2].split()
    except OSError:
        continue
    is_found = True
    print(*(column(pid, stat, booted + int(stat[19]) // os.sysconf("SC_CLK_TCK")) for column in columns))
sys.exit(not is_found)
