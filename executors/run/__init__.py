"""Starts, waits for, cancels, resumes, extends and removes runs: everything that acts on a run from outside.

Read `run.py` first: `Run` is what a user holds. `run_manager.py` acts for one process, `start_attempts.py` starts
replicas for every verb, `canceller.py` ends them, and `external_controller.py` restarts them. `lookup.py` finds
runs again.

Data enters as a view of the run (`executors.view`) and as the user's arguments. It leaves as orders to backends and as
records in the run's store.
"""
