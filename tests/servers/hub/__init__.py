"""A local Hugging Face Hub that runs jobs as processes."""
