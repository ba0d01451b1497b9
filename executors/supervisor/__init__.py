"""The supervising process: it starts, watches and ends the processes of ranks, and records each end.

Read `supervisor.py` first: one thread, one loop. `processes.py` holds the process of one attempt. `watchdog.py` and
`activity.py` judge its progress. `exits.py` explains an end that left no outcome. `container.py` is the supervisor of a
container, `spare.py` is a container that stands by, and `standalone.py` is the command that runs either of them. The
other process, which becomes a rank, is in `executors/worker`.

Data enters as a `RunSpec`, as records in the store, and through the page of memory that a rank shares with its
supervisor. It leaves as outcomes, heartbeats and dumps of stacks in the store, and as lines in the log of the rank.

The life cycle of a supervised attempt:

    claimed by number --> start --> running --+-- exits -----------------------------> reaped --> outcome recorded
          (begin)                             |                                          ^              |
                                              +-- deadline, cancel, stop, hang, fence     |              v
                                              |       SIGTERM --> grace --> SIGKILL ------+     the controller decides
                                              |                               |                 (executors/restarts)
                                              |                               v                         |
                                              |                       stuck in the kernel:              v
                                              +-- launcher, lease     given up, recorded        the next attempt, or
                                                  or run is gone                                nothing more to do
"""
