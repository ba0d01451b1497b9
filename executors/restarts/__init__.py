"""Restarts: the decision after each ended attempt, and the process that carries the decision out.

Read `rules.py` first: `decide` is a pure function of the log and of outcomes. `decision_log.py` keeps the write-once
entries, `orders.py` adds the entries of a user, and `decision_text.py` puts an entry into words. `controller.py`
decides and starts what follows. It is driven by a supervisor (`session.py`), by a process outside of the run's
machines (`launch_starter.py` starts replicas for `run/external_controller.py`), or by a spare (`supervisor/spare.py`).
`lease.py` ends containers that no process watches. `restart_view.py` shows users what was decided.

Data enters as outcomes and records of attempts, and leaves as entries of the log and as started attempts.

The life cycle of a rank:

    attempt runs --ends--> outcome --decide()--> entry of the log --+-- restart --> wait --> next attempt runs
                              ^                      ^               +-- give_up --> blocked until a resume
                              |                      |               +-- stop -----> all ranks are blocked
                  worker, supervisor, or     controller: the first   +-- None -----> the end is final
                  an external controller     writer of an entry
                  records the end            wins
"""
