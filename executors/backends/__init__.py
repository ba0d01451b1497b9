"""The executors of this package: local processes, this process, and one file for each service that runs jobs."""
