"""Text and conversations to token ids."""
