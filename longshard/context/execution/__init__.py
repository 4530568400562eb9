"""Plans carried out: tensors, kernels, collectives."""
