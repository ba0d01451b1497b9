"""What replicas measure over time, kept with the run as write-once segments: see `rows`, `recorder` and `metrics`."""
