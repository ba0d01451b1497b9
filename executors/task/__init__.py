"""The task and the record of a run: the entrypoint with its arguments, the settings, and how they are stored.

Read `create.py` first: it writes a new run. `record.py` has the records, `stored.py` reads a task and loads it in a
replica, and `entrypoint.py` finds the function. `arguments.py`, `placeholders.py`, `pickles.py` and `sources.py` are
about its arguments. `addition_record.py` and `removal_record.py` have the records of added ranks and of a removal.

Input is a `LaunchRequest`. Output is objects in the store, and the function that a worker calls.
"""
