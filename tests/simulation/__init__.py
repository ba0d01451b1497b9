"""Runs the real rendezvous with simulated processes, a simulated clock and a simulated store.

Read `world.py` first: it has the scheduler and the store with faults. `scenario.py` derives a schedule from a seed,
`simulation.py` runs it, and `invariants.py` checks it. `restarts/` does the same for restart decisions.
"""
