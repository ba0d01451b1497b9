"""Notifications: messages to the user's phone or chat about events of a run.

Read `reader.py` first: it decides which events of a run are notices, from the records in the store alone. `outbox.py`
sends each notice once, among all processes that see the event. `sender.py` sends one message to a URL. `targets.py`
checks the URLs. `notifier.py` is the process that does all this beside a supervisor or a launching process, so that a
service that hangs never delays the run. A URL is a secret, and no record, message or command line contains it.
"""
