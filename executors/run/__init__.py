"""Starts, waits for, cancels, resumes, extends and removes runs.

Read `run.py` first: `Run` is the object that a user gets. `run_manager.py` does the work of a `Run` in one process.
`start_attempts.py` starts replicas for all callers, `canceller.py` ends them, and `external_controller.py` restarts
them. `lookup.py` finds existing runs.

Input is a view of the run (`executors.view`) and the user's arguments. Output is requests to backends and records in
the run's store.
"""
