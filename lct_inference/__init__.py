"""Use of a trained model: `lct generate`, `lct chat`, `lct serve` and `lct evaluate`. Only `lct` calls them.

All ranks of a context-parallel group hold parts of the model and of the caches, as in training. The trainer imports
nothing of this package.
"""
