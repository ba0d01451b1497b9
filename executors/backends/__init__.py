"""The executors that come with this package: local processes, and one file for each service that runs jobs."""
