"""Makes the page of a run, exports and messages about failures from records and rows; it never sees a `Run`.

Read `document.py` first: it makes one JSON document, which `page.py` puts into a file of HTML. `event_reader.py` finds
what happened, `root_cause.py` and `failures.py` explain failed runs, and `trackers/` sends numbers to other services.
"""
