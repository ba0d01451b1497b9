"""Reads a run: the state of its replicas, logs, events, trained model and page. Draws its progress.

Read `run_view.py` first: a `RunView` reads one run. `run_state_reader.py` reads the states of its replicas, with
`replica_records.py`, `replica_handles.py`, `backend_reports.py` and `supervisor_states.py` beside it. Functions that
take a view read the rest: `run_logs.py`, `run_events.py`, `run_model.py`, `run_page.py`. `report/` builds the page
and other documents from records and measurements. `progress.py` and `notebook.py` draw the progress of a run while a
process waits for it.

The data comes from the records of the store and from the backends of `executors.registry`. It is returned as
`RunStatus`, `Outcome`, lines, events and documents. This package writes only outcomes and reasons that a backend or a
service reports, because the ended replicas could not write them.
"""
