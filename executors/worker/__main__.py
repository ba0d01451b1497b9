"""`python -m executors.worker`: a replica that a command started."""

from executors.worker.standalone import main

if __name__ == "__main__":
    main()
