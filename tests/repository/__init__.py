"""Tests of the repository rather than the program, for `make check`."""
