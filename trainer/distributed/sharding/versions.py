"""Whether a tensor was changed in place since it was last looked at."""

import torch


def version_of(x: torch.Tensor) -> int:
    """Return the number of changes in place, which autograd counts; 0 for a tensor of inference mode."""
    return 0 if x.is_inference() else x._version  # no public name as of torch 2.13
