"""Callbacks for the trainers of other libraries: transformers (`hf`) and Lightning (`lightning`).

Read `trainer_link.py` first. It has the parts that both callbacks need, such as the totals of steps and the learning
rate schedules that follow the run. Each trainer has a file with its callback. The trainer calls the callback, and the
callback calls `DiLoCo.step()`. A round changes the trainer's model in place.
"""
