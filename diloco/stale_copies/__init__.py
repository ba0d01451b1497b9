"""Copies of the parameters outside the model: recognized when they undo a round, or were made before the first anchor.

An optimizer with a copy of its own (float32 master weights, the `z` of schedule-free optimizers) writes that copy into
the model at its next step, and so undoes each round without a word. `StaleCopies` compares a few values of the
parameters one step after a merge. Values nearer to where they were before the merge are a suspicion, and no proof: with
rounds as short as a step, or a loss that one step minimizes, an honest optimizer does the same. Three things follow a
suspicion:

1. The optimizer is searched for copies of the suspected values; or all that the training loop's variables lead to, if
   no optimizer of torch steps the model's own parameters. Where there is none, only several merges in a row that were
   clearly undone lead on to the next point.
2. The next optimizer step is a test. The suspected values are moved far right before it, when the gradient is already
   computed, and looked at after it. An optimizer that steps the model's own parameters keeps the move, and one that
   writes a copy does not. The move costs a few values their last bits, so it is made only here.
3. A copy alone is allowed: the training loop may give it the merged values after each round. So the copies are read
   after the next merge, right before the next optimizer step. One that has the merged values follows the rounds.

Read `comparison.py` first. A merge enters by `StaleCopies.before_merge` and `after_merge`, and an optimizer step by
`check`. A suspicion leads to `search.py` and then to `move_test.py`. The result is a warning, or a
`StaleCopyError` for the training loop.
"""
