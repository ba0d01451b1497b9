"""Benchmarks: each of ours beside the peer it is compared with, in one run.

    python -m tests.benchmarks [L1 L2 …] [--repeat N] [--seconds S] [--json FILE] [--quick]

What is compared is measured interleaved, and only ratios of medians from one run mean anything: the seconds are those
of this machine, today. Nothing here fails because something was slow. Where there is no peer the goals are numbers.
"""
