"""`python -m executors.supervisor`: the first process of a container, which supervises one replica."""

from executors.supervisor.standalone import main

if __name__ == "__main__":
    main()
