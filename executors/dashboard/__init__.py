"""Serves the runs of a store as pages that update themselves: `replicas dashboard`.

Read `server.py` first. It has the routes, and `access.py` decides which requests get an answer. `board.py` knows the
runs and looks at those that continue. `run_feed.py` looks at one run, and keeps what its pages show. `run_store.py`
limits the requests of a look. `changes.py` computes what is new for a page. `log_feed.py` follows the log of a rank,
and `actions.py` calls the command for the buttons.

Data enters as the records of a store, through `executors.view`. It leaves as the page of `replicas report`, as parts of
that page, and as lines of logs.
"""
