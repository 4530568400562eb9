"""Sharded axes: which rank owns which rows, and how rows are exchanged."""
