"""What a batch is, how ranks share it, and its loss. The loop calls the task of the data."""
