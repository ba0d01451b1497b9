"""Records and reads the measurements of replicas over time.

They are stored in write-once segments; see `rows`, `recorder` and `metrics`.
"""
