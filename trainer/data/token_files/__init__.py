"""Documents as token ids in files: their format, how they are made and read."""
