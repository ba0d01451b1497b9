"""Benchmarks of this project, each compared with a peer in the same run.

    python -m tests.benchmarks [L1 L2 …] [--repeat N] [--seconds S] [--json FILE] [--quick]

The methods of a comparison are measured in turn. Only ratios of medians from one run have a meaning, because the
seconds depend on this machine today. No benchmark fails because something was slow. Without a peer, the goals are
numbers.
"""
