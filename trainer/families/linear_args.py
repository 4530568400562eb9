"""Arguments of the layers of linear attention. Torch-free."""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

Shapes = dict[str, tuple[int, int]]


class LinearArgs(Protocol):
    """One kind of layer. A layer has states of (K, V) numbers."""

    kernel: int
    """Tokens of its short convolutions."""
    convolution_bias: bool
    gates: tuple[str, ...]
    """Linear modules whose outputs are decays, steps or gates of heads, and the matrices before them."""

    @property
    def states(self) -> tuple[int, int, int]:
        """Return how many states a layer has, K and V."""

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Return what tensor-parallel ranks divide, by the words of a message."""

    def convolved(self) -> dict[str, int]:
        """Return the channels of each convolution by its name, in the order of the tensor that some files have."""

    def linear_shapes(self, dim: int, tp: int = 1) -> Shapes:
        """Return (outputs, inputs) of its linear modules on one of `tp` tensor-parallel ranks."""

    def vectors(self) -> int:
        """Return the parameters of all its other modules."""


def state_flops(args: LinearArgs) -> int:
    """Return the FLOPs of a token's forward that read and change the states: three products of (K, V) each."""
    states, keys, values = args.states
    return 6 * states * keys * values


@dataclass(frozen=True)
class GatedDeltaArgs:
    """Gated DeltaNet (arXiv 2412.06464)."""

    key_heads: int
    value_heads: int
    """A multiple of `key_heads`: the states of a layer."""
    key_dim: int
    value_dim: int
    kernel: int = 4
    convolution_bias = False
    gates = ("in_ba",)

    @property
    def states(self) -> tuple[int, int, int]:
        return self.value_heads, self.key_dim, self.value_dim

    def tensor_parallel_sizes(self) -> dict[str, int]:
        return {"key heads of linear attention": self.key_heads}

    def convolved(self) -> dict[str, int]:
        keys = self.key_heads * self.key_dim
        return {"q": keys, "k": keys, "v": self.value_heads * self.value_dim}

    def linear_shapes(self, dim: int, tp: int = 1) -> Shapes:
        values = self.value_heads * self.value_dim
        return {
            "in_qkvz": ((sum(self.convolved().values()) + values) // tp, dim),
            "in_ba": (2 * self.value_heads // tp, dim),
            "wo": (dim, values // tp),
        }

    def vectors(self) -> int:
        return (
            sum(self.convolved().values()) * self.kernel + 2 * self.value_heads + self.value_dim
        )


@dataclass(frozen=True)
class KimiDeltaArgs:
    """Kimi Delta Attention (arXiv 2510.26692)."""

    heads: int
    head_dim: int
    kernel: int = 4
    convolution_bias = False
    gates = "wb", "f_a", "f_b", "g_a", "g_b"

    @property
    def states(self) -> tuple[int, int, int]:
        return self.heads, self.head_dim, self.head_dim

    def tensor_parallel_sizes(self) -> dict[str, int]:
        return {"heads of linear attention": self.heads}

    def convolved(self) -> dict[str, int]:
        return dict.fromkeys("qkv", self.heads * self.head_dim)

    def linear_shapes(self, dim: int, tp: int = 1) -> Shapes:
        channels = self.heads * self.head_dim // tp
        narrow = (self.head_dim, dim)
        wide = (channels, self.head_dim)
        return {
            **dict.fromkeys(("wq", "wk", "wv"), (channels, dim)),
            "wb": (self.heads // tp, dim),
            "f_a": narrow,
            "f_b": wide,
            "g_a": narrow,
            "g_b": wide,
            "wo": (dim, channels),
        }

    def vectors(self) -> int:
        channels = self.heads * self.head_dim
        return 3 * channels * self.kernel + self.heads + channels + self.head_dim


@dataclass(frozen=True)
class MambaArgs:
    """Mamba-2 (arXiv 2405.21060)."""

    heads: int
    head_dim: int
    state_dim: int
    groups: int = 1
    """Groups of heads that share B and C, a divisor of `heads`."""
    kernel: int = 4
    convolution_bias: bool = True
    gates: ClassVar[tuple[str, ...]] = ("in_dt",)

    @property
    def states(self) -> tuple[int, int, int]:
        return self.heads, self.state_dim, self.head_dim

    def tensor_parallel_sizes(self) -> dict[str, int]:
        groups = {"groups of heads of Mamba": self.groups} if self.groups > 1 else {}
        return {"heads of Mamba": self.heads, **groups}

    def convolved(self) -> dict[str, int]:
        of_groups = self.groups * self.state_dim
        return {"x": self.heads * self.head_dim, "b": of_groups, "c": of_groups}

    def linear_shapes(self, dim: int, tp: int = 1) -> Shapes:
        values = self.heads * self.head_dim // tp
        of_groups = self.groups * self.state_dim
        of_groups //= tp if self.groups > 1 else 1  # of one group all ranks have B and C
        rows = {
            "in_z": values,
            "in_x": values,
            "in_b": of_groups,
            "in_c": of_groups,
            "in_dt": self.heads // tp,
        }
        return {**{name: (size, dim) for name, size in rows.items()}, "wo": (dim, values)}

    def vectors(self) -> int:
        channels = sum(self.convolved().values())
        return (
            channels * (self.kernel + self.convolution_bias)
            + 3 * self.heads
            + self.heads * self.head_dim
        )


_KINDS: dict[str, type] = {
    "gated_delta": GatedDeltaArgs,
    "kimi_delta": KimiDeltaArgs,
    "mamba2": MambaArgs,
}


def linear_args(kind: str, **fields: Any) -> LinearArgs:
    """Return the arguments of a layer of a kind, as in sizes.toml."""
    return _KINDS[kind](**fields)
