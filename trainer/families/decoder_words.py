"""A description of a decoder in words. Torch-free."""

from typing import Any

from trainer.families.args import all_layers


def decoder_words(args: Any) -> str:
    """Return a description of a decoder: its sizes, and the parts that not every decoder has. It has no full stop.

    Args:
        args: The arguments of the model, `TransformerArgs`, whose module imports this one.
    """
    layers = f"{args.n_layers} layers of width {args.dim}"
    heads = f"{args.n_heads} query and {args.n_kv_heads} key/value heads of {args.head_dim}"
    words = f"{layers}, {heads}"
    if (others := args.global_heads) is not None:
        number = sum(kind.global_heads for kind in args.kinds)
        words = f"{words}, in {number} layers {others.n_kv_heads} key/value heads of {others.head_dim}"
    if args.latent is not None:
        sizes = f"{args.latent.rank} + {args.latent.rope_dim}"
        words = f"{layers}, {args.n_heads} heads, latents of {sizes}"
    if (index := args.index) is not None:
        chooser = f"{index.n_heads} index heads of {index.head_dim}"
        words = f"{words}, {chooser} choose {index.per_query} of them for a query"
    if args.linear is not None:
        number, keys, values = args.linear.states
        states = f"{number} states of {keys} x {values}"
        recurrent = sum(args.kind(layer).linear for layer in all_layers(args))
        words = f"{words}, in {recurrent} layers linear attention with {states}"
    if args.mtp_layers:
        words = f"{words}, {args.mtp_layers} for further tokens"
    if (experts := args.experts) is None:
        return words
    chosen = (
        f"{experts.per_token} of {experts.number} experts of width {experts.hidden_dim} a token"
    )
    return f"{words}, {chosen} ({args.n_active_params():,} active parameters)"
