"""The arguments of a model, as the job, its checks and its checkpoints use them. Torch-free."""

from typing import Any, ClassVar, Protocol

from trainer.config.schema import Model
from trainer.families.feed_forward_args import ExpertArgs
from trainer.families.mixers import LatentArgs


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

    def configured(
        self, settings: Model, *, vocab_size: int, max_seq_len: int
    ) -> "DecoderArgs":
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
    record = getattr(args, "layer", None)  # a package's model may have no records of layers
    return [layer for layer in all_layers(args) if record is None or record(layer).has_experts]


def kind_of_layer(args: DecoderArgs, layer: int) -> Any:
    """Return what tells a layer from those of other kinds."""
    return args.layer(layer) if hasattr(args, "layer") else args.window_of_layer(layer)


def rotary_tables(args: DecoderArgs) -> int:
    """Return how many rotary tables the layers use."""
    if not hasattr(args, "layer"):
        return 1
    return len({args.layer(layer).mixer.rope_theta for layer in all_layers(args)} - {0.0})


def windows_of(args: DecoderArgs) -> list[int | None]:
    """Return the sliding window of each layer."""
    return [args.window_of_layer(layer) for layer in range(args.n_layers)]


def has_windows(args: DecoderArgs) -> bool:
    """Return whether some layer sees a sliding window only."""
    return any(window is not None for window in windows_of(args))
