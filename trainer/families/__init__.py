"""Families of models before PyTorch: shapes, flavors, names in files, counts of parameters and operations."""
