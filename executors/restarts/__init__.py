"""Restarts: the decision after each ended attempt, and the process that carries the decision out.

Read `rules.py` first: `decide` is a pure function of the log and of outcomes. `decision_log.py` keeps the write-once
entries, `orders.py` adds the entries of a user, and `decision_text.py` describes an entry to the user. `controller.py`
decides on ended attempts and starts the next ones. It runs in a supervisor (`session.py`), in a process outside of the
run's machines (`run/external_controller.py`, `run/launch_starter.py`), or in a spare (`supervisor/spare.py`).
`lease.py` ends containers that no process watches. `fail_fast.py` ends a run at a failure before the first round.
`restart_view.py` shows the user the state of each ended replica: final, or waiting for a restart. The page
`docs/development/life-cycle.md` has the pictures.

Data enters as outcomes and records of attempts. It leaves as entries of the log and as started attempts.

The life cycle of a rank:

    attempt runs --ends--> outcome --decide()--> entry of the log --+-- restart --> wait --> next attempt runs
                              ^                      ^               +-- give_up --> blocked until a resume
                              |                      |               +-- stop -----> all ranks are blocked
                  worker, supervisor, or     controller: the first   +-- None -----> the end is final
                  an external controller     writer of an entry
                  records the end            wins
"""
