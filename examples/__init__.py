"""Packages that add to the program through `job.imports`; they are no part of it."""
