"""Kinds of data sets, their files, and the documents of these."""
