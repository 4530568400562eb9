"""Context parallelism of models that this project did not write. `longshard` has the public names."""
