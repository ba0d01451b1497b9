"""The protocol by which replicas train one model through a store. It does not import torch.

Read `training_side.py` first, then `round_runner.py`. Data enters as `PendingWork`: the training thread copies its live
work and hands it to the round runner. It leaves as `RoundResult`, which the training thread merges, and as objects in
the store (`keys.py` has their names, `frames.py` and `envelope.py` their bytes). The life of one round:

    training thread        round runner (in turn, or in a thread)          store
    ---------------        --------------------------------------          -----
    step(), step(), …      idle
    work is held      -->  ContributionSender sends                  -->   r<k>/contribution/<rank>
    training waits,        Sealer decides which contributions count  -->   seal/<k>
    or continues           Reducer reads or computes the mean        -->   r<k>/mean/<shard>, or in the seal
                           outer step: the anchor moves
                           SnapshotWriter stores it now and then     -->   snapshot/<k>, part/<k>/…
    result is merged  <--  RoundResult; the runner waits for the merge
    step(), step(), …      contribution is deleted

When a replica begins, comes back or has fallen behind, `LogReplayer` (`restore.py`) does the work of the middle column:
it loads a snapshot and applies the stored means.
"""
