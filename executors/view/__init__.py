"""Reads a run: the state of its replicas, logs, events, model, page, and how they are drawn.

Read `run_view.py` first: `RunView` is one run, and `run_state_reader.py` has the states of its replicas. Functions that
take a view read the rest: `run_logs.py`, `run_events.py`, `run_model.py`, `run_page.py`. `report/` makes the page and
other documents from records and rows, and never sees a run. `progress.py` and `notebook.py` draw while a process waits.

Data enters from the records of the store, and from the backends of `executors.registry`. It leaves as `RunStatus`,
`Outcome`, lines, events and documents. This room writes nothing but the outcomes that a backend reports and the
reasons of services: the replicas could not write these themselves.
"""
