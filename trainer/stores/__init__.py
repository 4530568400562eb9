"""Where checkpoints are kept: folders and remote stores, names and states of checkpoints."""
