"""The arguments of a model, as the job, its checks and its checkpoints use them. Torch-free."""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from trainer.config.schema import Model

Self = TypeVar("Self", bound="ModelArgs")


class ModelArgs(Protocol):
    """Arguments of one model of a family: a frozen dataclass. A checkpoint saves its fields to recognise the model.

    `dataclasses.replace` makes other arguments. A new field needs a default, which older checkpoints are taken to have.
    """

    __dataclass_fields__: dict[str, Any]
    task: ClassVar[str]
    """The task that trains it: 'tokens' (`DecoderArgs`), or one that a package has added."""
    free_to_change: ClassVar[frozenset[str]]
    """Fields that saved tensors do not depend on: a run may resume with other values."""

    norms_have_parameters: bool
    n_layers: int

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Return the sizes that a tensor-parallel degree must divide, by their names in messages; none: no TP."""

    def n_params(self) -> int:
        """Return the number of parameters; a tied embedding counts once."""

    def flops_per_token(self, seq_len: int) -> tuple[float, float]:
        """Return FLOPs of a training step per position of a sample of `seq_len`, as (full, causal) attention counts."""

    def words(self) -> str:
        """Return what it consists of, such as `4 layers of width 256`."""


class DecoderArgs(ModelArgs, Protocol):
    """Arguments of a language model."""

    dim: int
    """Size of a token's hidden state."""
    n_heads: int
    """Query heads."""
    n_kv_heads: int
    """Key/value heads; it divides `n_heads`."""
    head_dim: int
    qk_norm: bool
    """Whether each head's query and key are normalised."""
    vocab_size: int
    tie_embeddings: bool
    """Whether one matrix is both embedding and output."""

    def configured(self: Self, settings: Model, *, vocab_size: int, max_seq_len: int) -> Self:
        """Return the arguments with table `[model]`, the vocabulary and the sequence length applied.

        Raises:
            ConfigError: a setting that this family does not have.
        """

    def module_names(self) -> tuple[str, ...]:
        """Return the modules that a pipeline can divide, in the order of the forward; layers are `layers.N`."""

    def window_of_layer(self, layer: int) -> int | None:
        """Return how many tokens a token sees in this layer, itself included; None: all before it."""

    def linear_shapes(self, tp: int = 1) -> dict[str, tuple[int, int]]:
        """Return (outputs, inputs) of every linear module on one of `tp` tensor-parallel ranks, by name."""


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
    sigmoid: bool = False
    """Scores are sigmoids, to which a bias of the weights is added for the choice (DeepSeek-V3, arXiv 2412.19437)."""
    groups: int = 1
    """Groups of neighbouring experts; a group counts as much as its two best experts."""
    groups_per_token: int = 1
    """Groups that a token chooses its experts in."""
    scale: float = 1.0
    """Factor of the weights of a token's experts."""
    shared_dim: int = 0
    """Width of an expert that all tokens have, beside the chosen ones; 0: there is none."""
    shared_gate: bool = False
    """Whether each token multiplies the shared expert's output by a sigmoid of its own."""

    def weights(self, dim: int) -> int:
        """Return the parameters of one expert."""
        return 3 * dim * self.hidden_dim + (2 * self.hidden_dim + dim) * self.biases


def has_grouped_product(dtype: str, *widths: int) -> bool:
    """Return whether one kernel computes all experts: in bfloat16, with rows of matrices at multiples of 16 bytes."""
    return dtype == "bfloat16" and all(width % 8 == 0 for width in widths)


@dataclass(frozen=True)
class LatentArgs:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    rank: int
    """Width of what keys and values of all heads are computed from."""
    nope_dim: int
    """Channels of a head's query and key that are not rotated."""
    rope_dim: int
    """Channels behind them that are rotated; all heads share those of a key."""
    value_dim: int
    """Channels of a head's value, at most those of its key."""
    query_rank: int | None = None
    """Width of what queries are computed from; None: they are computed from the hidden states."""

    @property
    def head_dim(self) -> int:
        """Return the channels of a head's query and key."""
        return self.nope_dim + self.rope_dim

    def linear_shapes(self, dim: int, n_heads: int, tp: int = 1) -> dict[str, tuple[int, int]]:
        """Return (outputs, inputs) of its linear modules on one of `tp` tensor-parallel ranks."""
        queries = n_heads * self.head_dim // tp
        shapes = {"wq": (queries, dim)}
        if self.query_rank is not None:
            shapes = {"wq_a": (self.query_rank, dim), "wq_b": (queries, self.query_rank)}
        return shapes | {
            "wkv_a": (self.rank + self.rope_dim, dim),
            "wo": (dim, n_heads * self.value_dim // tp),
        }

    def up_projection(self, n_heads: int) -> int:
        """Return the weights that make keys and values of latents."""
        return n_heads * (self.nope_dim + self.value_dim) * self.rank

    def vectors(self) -> int:
        """Return the parameters of its norms."""
        return self.rank + (self.query_rank or 0)


def experts_of(args: ModelArgs) -> ExpertArgs | None:
    """Return the experts of a layer; None: the family, or the model, has none."""
    return getattr(args, "experts", None)


def latent_of(args: ModelArgs) -> LatentArgs | None:
    """Return the latent attention of a model; None: the family, or the model, has none."""
    return getattr(args, "latent", None)


def all_layers(args: ModelArgs) -> range:
    """Return the numbers of all layers, with those that predict further tokens behind the others."""
    return range(args.n_layers + mtp_layers_of(args))


def mtp_layers_of(args: ModelArgs) -> int:
    """Return how many layers predict further tokens."""
    return getattr(args, "mtp_layers", 0)


def is_further(args: ModelArgs, name: str) -> bool:
    """Return whether a parameter or module, by its name, is of a layer that predicts further tokens."""
    table, _, rest = name.partition(".")
    return table in ("layers", "mtp_norms") and int(rest.partition(".")[0]) >= args.n_layers


def expert_layers(args: ModelArgs) -> list[int]:
    """Return the layers that have experts."""
    if experts_of(args) is None:
        return []
    kind = getattr(args, "layer", None)  # a package's model may have no kinds
    return [layer for layer in all_layers(args) if kind is None or kind(layer).experts]


def kind_of_layer(args: DecoderArgs, layer: int) -> Any:
    """Return what tells a layer from those of other kinds."""
    return args.window_of_layer(layer), args.layer(layer) if hasattr(args, "layer") else None


def rotary_tables(args: DecoderArgs) -> int:
    """Return how many rotary tables the layers use."""
    if not hasattr(args, "theta_of_layer"):
        return 1
    return len({args.theta_of_layer(layer) for layer in all_layers(args)} - {0.0})


def has_windows(args: DecoderArgs) -> bool:
    """Return whether some layer sees a sliding window only."""
    return any(args.window_of_layer(layer) is not None for layer in range(args.n_layers))
