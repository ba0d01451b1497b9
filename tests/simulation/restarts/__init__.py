"""Runs the real restart decisions with simulated processes: supervisors, controllers, and the ranks that they start."""
