"""Finds copies of the parameters outside the model: copies that undo a round, and copies from before the first anchor.

An optimizer with a copy of its own (float32 master weights, the `z` of schedule-free optimizers) writes that copy into
the model at its next step, and so undoes each round without any message. `StaleCopies` compares a few values of the
parameters one step after a merge. If a value is nearer to its value before the merge, that is a suspicion and not a
proof. A normal optimizer does the same if rounds are as short as a step, or if one step minimizes the loss. Three steps
follow a suspicion:

1. The optimizer is searched for copies of the suspected values. If no optimizer of torch steps the model's own
   parameters, all objects that the training loop's variables lead to are searched. If the search finds nothing, step 2
   follows only after several merges in a row that were clearly undone.
2. The next optimizer step is a test. The suspected values are moved far away before the step, when the gradient is
   already computed, and compared after it. An optimizer that steps the model's own parameters keeps the move, and one
   that writes a copy does not. The move changes the last bits of a few values, so it is made only in this test.
3. A copy alone is allowed, because the training loop may give it the merged values after each round. So the copies are
   read after the next merge, right before the next optimizer step. A copy that has the merged values follows the
   rounds.

Read `comparison.py` first. A merge enters by `StaleCopies.before_merge` and `after_merge`, and an optimizer step by
`check`. A suspicion leads to `search.py` and then to `move_test.py`. The result is a warning, or a `StaleCopyError` for
the training loop.
"""
