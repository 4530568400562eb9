"""The arguments of a model, as the job, its checks and its checkpoints use them. Torch-free."""

from typing import Any, ClassVar, Protocol

from trainer.config.schema import Model
from trainer.families.feed_forward_args import ExpertArgs
from trainer.families.mixers import LatentArgs


class ModelArgs(Protocol):
    """Arguments of one model of a family: a frozen dataclass. A checkpoint saves its fields to recognise the model.

    `dataclasses.replace` makes other arguments. A new field needs a default, which is assumed for older checkpoints.
    """

    __dataclass_fields__: dict[str, Any]
    task: ClassVar[str]
    """The task that trains it: 'tokens' (`DecoderArgs`), or one that a package has added."""
    free_to_change: ClassVar[frozenset[str]]
    """Fields that saved tensors do not depend on: a run may resume with other values."""

    norms_have_parameters: bool
    n_layers: int

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Return the sizes that a tensor-parallel degree must divide, by their names in messages; empty: no TP."""

    def n_params(self) -> int:
        """Return the number of parameters; a tied embedding counts once."""

    def flops_per_token(self, seq_len: int) -> tuple[float, float]:
        """Return FLOPs of a training step per position, as (full, causal) attention counts.

        Args:
            seq_len: Number of positions of a sample.
        """

    def words(self) -> str:
        """Return a description of the parts, such as `4 layers of width 256`."""


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

        Args:
            settings: Table `[model]`.
            vocab_size: Number of tokens of the vocabulary.
            max_seq_len: Longest sequence, in tokens.

        Raises:
            ConfigError: This family does not have a setting.
        """

    def module_names(self) -> tuple[str, ...]:
        """Return the modules that a pipeline can divide, in the order of the forward; layers are `layers.N`."""

    def window_of_layer(self, layer: int) -> int | None:
        """Return how many tokens a token sees in this layer, itself included. None: all tokens before it.

        Args:
            layer: Number of the layer.
        """

    def linear_shapes(self, tp: int = 1) -> dict[str, tuple[int, int]]:
        """Return (outputs, inputs) of every linear module on one tensor-parallel rank, by name.

        Args:
            tp: Tensor-parallel degree.
        """


def decoder_modules(n_layers: int, mtp_layers: int = 0) -> tuple[str, ...]:
    """Return the names of the modules of a decoder, in the order of the forward.

    The layers are named "layers.0" and so on. Layers for further tokens continue the numbers, after "norm".

    Args:
        n_layers: Number of layers.
        mtp_layers: Number of layers for further tokens.
    """
    layers = [f"layers.{i}" for i in range(n_layers + mtp_layers)]
    return "tok_embeddings", *layers[:n_layers], "norm", *layers[n_layers:], "output"


def experts_of(args: ModelArgs) -> ExpertArgs | None:
    """Return the experts of a layer. None if the family, or the model, has none.

    Args:
        args: The arguments of the model.
    """
    return getattr(args, "experts", None)


def latent_of(args: ModelArgs) -> LatentArgs | None:
    """Return the latent attention of a model. None if the family, or the model, has none.

    Args:
        args: The arguments of the model.
    """
    return getattr(args, "latent", None)


def all_layers(args: ModelArgs) -> range:
    """Return the numbers of all layers; layers that predict further tokens come last.

    Args:
        args: The arguments of the model.
    """
    return range(args.n_layers + mtp_layers_of(args))


def mtp_layers_of(args: ModelArgs) -> int:
    """Return how many layers predict further tokens.

    Args:
        args: The arguments of the model.
    """
    return getattr(args, "mtp_layers", 0)


def is_further(args: ModelArgs, name: str) -> bool:
    """Return whether a parameter or module belongs to a layer that predicts further tokens.

    Args:
        args: The arguments of the model.
        name: Name of the parameter or module.
    """
    table, _, path = name.partition(".")
    return table in ("layers", "mtp_norms") and int(path.partition(".")[0]) >= args.n_layers


def expert_layers(args: ModelArgs) -> list[int]:
    """Return the numbers, from 0, of the layers that have experts; empty for a dense model.

    Layers that predict further tokens count too.

    Args:
        args: The arguments of the model.
    """
    if experts_of(args) is None:
        return []
    record = getattr(args, "layer", None)  # a package's model may have no records of layers
    return [layer for layer in all_layers(args) if record is None or record(layer).has_experts]


def kind_of_layer(args: DecoderArgs, layer: int) -> Any:
    """Return a value that is equal for layers of one kind.

    Args:
        args: The arguments of the model.
        layer: Number of the layer.
    """
    return args.layer(layer) if hasattr(args, "layer") else args.window_of_layer(layer)


def rotary_channels(args: DecoderArgs) -> int:
    """Return the number of channels of all rotary tables that a layer uses, summed over the tables.

    Channels that a table leaves unchanged count too. If no layer rotates, the result is 0.

    Args:
        args: The arguments of the model.
    """
    if not hasattr(args, "layer"):
        return args.head_dim
    thetas = {args.layer(layer).mixer.rope_theta for layer in all_layers(args)} - {0.0}
    return sum(sum(args.rotary_sizes(theta)) for theta in thetas)


def widest_head(args: DecoderArgs) -> int:
    """Return the largest size of a query head.

    Args:
        args: The arguments of the model.
    """
    others = getattr(args, "global_heads", None)
    return args.head_dim if others is None else max(args.head_dim, others.head_dim)


def windows_of(args: DecoderArgs) -> list[int | None]:
    """Return the sliding window of each layer.

    Args:
        args: The arguments of the model.
    """
    return [args.window_of_layer(layer) for layer in range(args.n_layers)]


def has_windows(args: DecoderArgs) -> bool:
    """Return whether any layer sees only a sliding window.

    Args:
        args: The arguments of the model.
    """
    return any(window is not None for window in windows_of(args))
