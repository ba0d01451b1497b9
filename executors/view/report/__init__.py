"""Turns the records and measurements of a run into its HTML page, exported files, and messages about failures.

This package gets records and rows, and never a `Run`. Read `document.py` first. It builds one JSON document, and
`page.py` writes this document as an HTML file. `event_reader.py` builds the list of events. `root_cause.py` and
`failures.py` explain failed runs. `trackers/` sends numbers to other services.
"""
