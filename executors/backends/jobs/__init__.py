"""An executor over any service that runs a command in a container: everything of a cloud but its SDK."""
