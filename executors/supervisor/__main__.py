"""`python -m executors.supervisor`: a replica that a command started."""

from executors.supervisor.standalone import main

if __name__ == "__main__":
    main()
