"""The backend local: replicas as processes of this machine."""
