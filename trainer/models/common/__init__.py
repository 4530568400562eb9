"""Building blocks that model families share: single-device code, to which parallelism is applied from outside.

B batch, S sequence, H query heads, K key/value heads, D head size.
"""
