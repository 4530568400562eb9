"""What attention is to be computed where, and what travels: integers only, no torch."""
