"""What is measured once on a machine with a GPU: see `run.sh`."""
