"""The long-context trainer. Public names are in its packages."""

__version__ = "0.9.0"
