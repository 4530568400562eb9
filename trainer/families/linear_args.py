"""Arguments of the layers of linear attention. Torch-free."""

from dataclasses import dataclass
from typing import Any, ClassVar

from trainer.families.mixers import Mixer, Names, Shapes, Sizes


class LinearArgs(Mixer):
    """The shared parts of all kinds of linear attention. A layer has states of (K, V) numbers, and rotates nothing."""

    is_recurrent = True
    window = None
    rope_theta = 0.0
    kernel: int
    """Tokens of its short convolutions."""
    convolution_bias: bool
    gates: ClassVar[tuple[str, ...]]
    """Linear modules whose outputs are decays, steps or gates of heads, and the matrices before them."""

    @property
    def states(self) -> tuple[int, int, int]:
        """Number of states of a layer, K and V."""
        raise NotImplementedError

    def convolved(self) -> Sizes:
        """Return the channels of each convolution by its name, in the order of the tensor that some files have."""
        raise NotImplementedError

    def other_weights(self) -> int:
        """Return the number of weights of the convolutions."""
        return sum(self.convolved().values()) * self.kernel

    def flops(self, seq_len: int) -> tuple[float, float]:
        """Count the recurrence, for any length: a token's forward reads and changes states in three products.

        Args:
            seq_len: Not used.

        Returns:
            FLOPs per token of a training step, twice.
        """
        states, keys, values = self.states
        recurrence = 18.0 * states * keys * values
        return recurrence, recurrence


@dataclass(frozen=True)
class GatedDeltaArgs(LinearArgs):
    """Gated DeltaNet (arXiv 2412.06464)."""

    key_heads: int
    value_heads: int
    """A multiple of `key_heads`: the states of a layer."""
    key_dim: int
    value_dim: int
    kernel: int = 4
    by_head: bool = True
    """Whether two matrices have all rows, key head after key head (Qwen3-Next). False: each part has a matrix."""
    convolution_bias = False
    names: ClassVar[Names] = {
        "in_qkvz": "linear_attn.in_proj_qkvz",
        "in_ba": "linear_attn.in_proj_ba",
        **{f"in_{part}": "linear_attn.in_proj_qkv" for part in "qkv"},
        "in_z": "linear_attn.in_proj_z",
        "in_beta": "linear_attn.in_proj_b",
        "in_decay": "linear_attn.in_proj_a",
        **{f"{part}_conv": "linear_attn.conv1d" for part in "qkv"},
        "decay.a_log.weight": "linear_attn.A_log",
        "decay.dt_bias.weight": "linear_attn.dt_bias",
        "norm": "linear_attn.norm",
        "wo": "linear_attn.out_proj",
    }

    @property
    def gates(self) -> tuple[str, ...]:
        """The matrices of the inputs of beta and of the decays."""
        return ("in_ba",) if self.by_head else ("in_beta", "in_decay")

    @property
    def states(self) -> tuple[int, int, int]:
        """Sizes of a sequence's state: heads, and rows and columns of a head's matrix."""
        return self.value_heads, self.key_dim, self.value_dim

    def tensor_parallel_sizes(self) -> Sizes:
        """Return the key heads."""
        return {"key heads of linear attention": self.key_heads}

    def convolved(self) -> Sizes:
        """Return the channels of the convolutions of queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return {"q": keys, "k": keys, "v": self.value_heads * self.value_dim}

    def linear_shapes(self, dim: int, tp: int = 1) -> Shapes:
        """Return (outputs, inputs) of its linear modules on one tensor-parallel rank, by name.

        Args:
            dim: Channels of the hidden states.
            tp: Tensor-parallel degree.
        """
        values = self.value_heads * self.value_dim
        convolved = self.convolved()
        if self.by_head:
            whole = sum(convolved.values()) + values
            rows = {"in_qkvz": whole, "in_ba": 2 * self.value_heads}
        else:
            rows = {
                **{f"in_{part}": channels for part, channels in convolved.items()},
                "in_z": values,
                "in_beta": self.value_heads,
                "in_decay": self.value_heads,
            }
        shapes = {name: (number // tp, dim) for name, number in rows.items()}
        return shapes | {"wo": (dim, values // tp)}

    def vectors(self, dim: int) -> int:
        """Return the number of parameters of decays and the norm.

        Args:
            dim: Not used.
        """
        return 2 * self.value_heads + self.value_dim


@dataclass(frozen=True)
class KimiDeltaArgs(LinearArgs):
    """Kimi Delta Attention (arXiv 2510.26692)."""

    heads: int
    head_dim: int
    kernel: int = 4
    convolution_bias = False
    gates = "wb", "f_a", "f_b", "g_a", "g_b"
    names: ClassVar[Names] = {
        **{f"w{part}": f"self_attn.{part}_proj" for part in "qkvbo"},
        "f_a": "self_attn.f_a_proj",
        "f_b": "self_attn.f_b_proj",
        "g_a": "self_attn.g_a_proj",
        "g_b": "self_attn.g_b_proj",
        **{f"{part}_conv": f"self_attn.{part}_conv1d" for part in "qkv"},
        "decay.a_log.weight": "self_attn.A_log",
        "decay.dt_bias.weight": "self_attn.dt_bias",
        "norm": "self_attn.o_norm",
    }

    @property
    def states(self) -> tuple[int, int, int]:
        """Sizes of a sequence's state: heads, and rows and columns of a head's matrix."""
        return self.heads, self.head_dim, self.head_dim

    def tensor_parallel_sizes(self) -> Sizes:
        """Return the heads."""
        return {"heads of linear attention": self.heads}

    def convolved(self) -> Sizes:
        """Return the channels of the convolutions of queries, keys and values."""
        return dict.fromkeys("qkv", self.heads * self.head_dim)

    def linear_shapes(self, dim: int, tp: int = 1) -> Shapes:
        """Return (outputs, inputs) of its linear modules on one tensor-parallel rank, by name.

        Every rank has the whole modules `f_a` and `g_a`.

        Args:
            dim: Channels of the hidden states.
            tp: Tensor-parallel degree.
        """
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

    def vectors(self, dim: int) -> int:
        """Return the number of parameters of decays and the norm.

        Args:
            dim: Not used.
        """
        return self.heads + self.heads * self.head_dim + self.head_dim


@dataclass(frozen=True)
class MambaArgs(LinearArgs):
    """Mamba-2 (arXiv 2405.21060)."""

    heads: int
    head_dim: int
    state_dim: int
    groups: int = 1
    """Groups of heads that share B and C, a divisor of `heads`."""
    kernel: int = 4
    convolution_bias: bool = True
    gates: ClassVar[tuple[str, ...]] = ("in_dt",)
    names: ClassVar[Names] = {
        **{f"in_{part}": "mamba.in_proj" for part in ("z", "x", "b", "c", "dt")},
        **{f"{part}_conv": "mamba.conv1d" for part in "xbc"},
        **{f"{part}_bias.weight": "mamba.conv1d.bias" for part in "xbc"},
        "decay.a_log.weight": "mamba.A_log",
        "decay.dt_bias.weight": "mamba.dt_bias",
        "skip.weight": "mamba.D",
        "norm": "mamba.norm",
        "wo": "mamba.out_proj",
    }

    @property
    def states(self) -> tuple[int, int, int]:
        """Sizes of a sequence's state: heads, and rows and columns of a head's matrix."""
        return self.heads, self.state_dim, self.head_dim

    def tensor_parallel_sizes(self) -> Sizes:
        """Return the heads, and several groups of heads."""
        groups = {"groups of heads of Mamba": self.groups} if self.groups > 1 else {}
        return {"heads of Mamba": self.heads, **groups}

    def convolved(self) -> Sizes:
        """Return the channels of the convolutions of x, B and C."""
        group_channels = self.groups * self.state_dim
        return {"x": self.heads * self.head_dim, "b": group_channels, "c": group_channels}

    def linear_shapes(self, dim: int, tp: int = 1) -> Shapes:
        """Return (outputs, inputs) of its linear modules on one tensor-parallel rank, by name.

        If there is one group, every rank has the whole B and C.

        Args:
            dim: Channels of the hidden states.
            tp: Tensor-parallel degree.
        """
        values = self.heads * self.head_dim // tp
        group_channels = self.groups * self.state_dim
        if self.groups > 1:  # with one group, all ranks have B and C
            group_channels //= tp
        rows = {
            "in_z": values,
            "in_x": values,
            "in_b": group_channels,
            "in_c": group_channels,
            "in_dt": self.heads // tp,
        }
        return {**{name: (size, dim) for name, size in rows.items()}, "wo": (dim, values)}

    def vectors(self, dim: int) -> int:
        """Return the number of parameters of biases, decays, the skip connection and the norm.

        Args:
            dim: Not used.
        """
        biases = sum(self.convolved().values()) * self.convolution_bias
        return biases + 3 * self.heads + self.heads * self.head_dim


_KINDS: dict[str, type] = {
    "gated_delta": GatedDeltaArgs,
    "kimi_delta": KimiDeltaArgs,
    "mamba2": MambaArgs,
}


def linear_args(kind: str, **fields: Any) -> LinearArgs:
    """Return the arguments of a layer of a kind.

    Args:
        kind: The kind, as in sizes.toml.
        **fields: Its fields.
    """
    return _KINDS[kind](**fields)
