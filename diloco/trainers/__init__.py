"""Other people's trainers, each with a DiLoCo beside its optimizer: `hf` and `lightning`.

Read `companion.py` first: it has what both trainers need, such as the totals and the schedules that follow the run. A
trainer calls the callback of its own file, and the callback calls `DiLoCo.step()`. The model of the trainer is changed
in place.
"""
