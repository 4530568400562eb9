"""Context parallelism, one sequence over many ranks. `longshard` has the public names."""
