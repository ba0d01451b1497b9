"""The parts that all backends over a service share: a service runs a command as a job, in a cloud or on a cluster."""
