"""Arguments of a mixture of experts. Torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertArgs:
    """The experts of a layer, and how a token chooses among them."""

    number: int
    per_token: int
    """Experts that a token chooses."""
    hidden_dim: int
    """Width of one expert."""
    normalise: bool = True
    """Whether the weights of a token's experts have the sum one: a softmax over the chosen ones, not over all."""
    biases: bool = False
    """Of the router and of the experts."""
    clamped: bool = False
    """The gated unit of gpt-oss in the place of SwiGLU."""

    def weights(self, dim: int) -> int:
        """Return the parameters of one expert."""
        return 3 * dim * self.hidden_dim + (2 * self.hidden_dim + dim) * self.biases
