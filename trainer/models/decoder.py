"""The decoder of all families of language models, as single-device code. Its arguments say what a family has.

Llama 3 is arXiv 2407.21783, Qwen3 2505.09388, Qwen2 2407.10671, Mistral 2310.06825, Gemma 3
2503.19786, OLMo 2 2501.00656, GLM-4.5 2508.06471, DeepSeek-V3 2412.19437.

`trainer/models/parallelize.py` applies parallelism to it from outside; `trainer/models/block.py` has its layers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from longshard.context.live import own_positions, with_layer
from longshard.sharding.tensors import wide_type
from trainer.families.args import all_layers
from trainer.families.decoder_args import TransformerArgs
from trainer.families.layer_kinds import key_sources
from trainer.models.block import FurtherTokenLayer, TransformerBlock
from trainer.models.initialization import fill
from trainer.models.moe import routers_of
from trainer.models.norms import build_norm
from trainer.models.rotary import freqs_cis_at, rope_frequencies


def _own(theta: float | None) -> str:
    """Return the buffer name of the frequencies of layers with this base. None: the frequencies of the model."""
    return "frequencies" if theta is None else f"frequencies_of_{theta}".replace(".", "_")


def _scaled(x: Tensor, scale: float) -> Tensor:
    """Return x times a scale, which is rounded to the dtype of x: sqrt(3072) is 55.5 in bfloat16."""
    return x if scale == 1 else x * torch.full((), scale, dtype=x.dtype, device=x.device)


class CappedOutput(nn.Linear):
    """Projection to logits c * tanh(logit / c), whose size is bounded (Gemma 2, arXiv 2408.00118).

    Args:
        dim: Channels of the hidden states.
        vocab_size: Number of tokens of the vocabulary.
        softcap: c.
    """

    def __init__(self, dim: int, vocab_size: int, softcap: float) -> None:
        super().__init__(dim, vocab_size, bias=False)
        self.softcap = softcap

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits, (B, S, vocab).

        Args:
            hidden: (B, S, dim).
        """
        return self.softcap * torch.tanh(super().forward(hidden) / self.softcap)


class Transformer(nn.Module):
    """The decoder. `forward` returns hidden states; the loss calls `output`, the projection to logits.

    A pipeline stage has some of the layers, and None instead of an embedding, norm or output that it lacks.

    Args:
        args: The sizes of the model, and what its layers are made of.
    """

    def __init__(self, args: TransformerArgs) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        numbers = all_layers(args)
        further = numbers[args.n_layers :]
        # A dictionary keeps the names of layers when a pipeline stage removes some layers.
        self.layers = nn.ModuleDict(
            {
                str(i): (FurtherTokenLayer if i in further else TransformerBlock)(args, i)
                for i in numbers
            }
        )
        self.layer_embeddings = self.layer_projection = self.layer_projection_norm = None
        if args.per_layer_dim:
            self.layer_embeddings = nn.Embedding(args.vocab_size, args.layer_channels)
            self.layer_projection = nn.Linear(args.dim, args.layer_channels, bias=False)
            self.layer_projection_norm = build_norm(args.norms, args.per_layer_dim)
        self.key_sources = key_sources(args.kinds)
        self.norm = build_norm(args.norms, args.dim)
        self.mtp_norms = nn.ModuleDict({str(i): deepcopy(self.norm) for i in further})
        cap = args.logits_softcap
        sizes = args.dim, args.vocab_size
        self.output = (
            nn.Linear(*sizes, bias=False) if cap is None else CappedOutput(*sizes, cap)
        )
        if args.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight
        own = {theta for i in numbers if (theta := args.layer(i).mixer.rope_theta)}
        self.thetas = None, *sorted(own)
        for theta in self.thetas:
            pairs = sum(args.rotary_sizes(theta)) // 2
            self.register_buffer(_own(theta), torch.empty(pairs), persistent=False)
        self.rotary_dtype = torch.float32
        self.by_length = False
        """Whether LongRoPE chooses its factors by the length of each text, as in transformers, not by `max_seq_len`."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attention_plan: Tensor | None = None,
        next_tokens: Tensor | None = None,
        **adapter_inputs: Tensor,
    ) -> Tensor:
        """Return the hidden states of tokens, (B, S, dim).

        Args:
            tokens: (B, S). A pipeline stage without the embedding takes hidden states, (B, S, dim), instead.
            positions: (B, S), -1 for padding. By default this rank's positions in the plan, or 0 to S - 1.
            attention_plan: Handle of the open `context_parallel`. None without a plan.
            next_tokens: (B, S, K), the K tokens after each token. Adds their hidden states, or between stages their
                embeddings, to the result: (B (1 + K), S, dim).
            **adapter_inputs: `token_numbers`, (B, S), if adapters have dropout.
        """
        tables = self._freqs_cis(tokens, positions, attention_plan)
        x = tokens
        embedded = ()
        if self.tok_embeddings is not None:
            if next_tokens is not None:
                x = torch.cat([tokens, *next_tokens.unbind(-1)])
            x = _scaled(self.tok_embeddings(x), self.args.embedding_scale)
        if next_tokens is not None:
            x, *embedded = x.chunk(1 + next_tokens.shape[-1])
        own_inputs = self._layer_inputs(tokens, x)
        keys_of = {}

        def through(number: str, x: Tensor) -> Tensor:
            own = self._inputs_of(int(number), own_inputs, keys_of) | adapter_inputs
            table = tables.get(self.layers[number].theta)
            plan = with_layer(attention_plan, int(number))
            x = self.layers[number](x, table, plan, positions, **own)
            if self.layers[number].gives_keys:
                x, *keys_of[int(number)] = x
            return x

        for number in self.layers:
            if int(number) < self.args.n_layers:
                x = through(number, x)
        if self.norm is None:
            # A stage with only the output returns its input; torch 2.11 finds no gradient for it, so return a view.
            x = x if len(self.layers) or self.tok_embeddings is not None else x.view_as(x)
            return torch.cat([x, *embedded]) if embedded else x
        x = self.norm(x)
        if embedded:
            x = self._with_further(x, embedded, through)
        return x if self.args.logits_divisor == 1 else x / self.args.logits_divisor

    def _with_further(
        self, x: Tensor, embedded: Sequence[Tensor], through: Callable[[str, Tensor], Tensor]
    ) -> Tensor:
        """Return x, and after it the hidden states of further tokens: (B (1 + K), S, dim).

        embedded: embeddings of each of the K further tokens, (B, S, dim). through: (number of a layer, input) ->
            output.
        """
        hidden = [x]
        for number, next_embedding in zip(self.mtp_norms, embedded, strict=True):
            x = through(number, torch.cat([next_embedding, hidden[-1]], -1))
            hidden.append(self.mtp_norms[number](x))
        return torch.cat(hidden)

    def _inputs_of(
        self, layer: int, own_inputs: Tensor | None, keys_of: Mapping[int, Sequence[Tensor]]
    ) -> dict[str, Any]:
        """Return what a layer gets besides the output of the layer before: its own input, and shared keys.

        own_inputs: see `_layer_inputs`. keys_of: number of a layer -> the keys and values that it gives.
        """
        own = {} if own_inputs is None else {"layer_input": own_inputs[:, :, layer]}
        source = self.key_sources.get(layer)
        return own if source is None else own | {"keys": keys_of[source]}

    def _layer_inputs(self, tokens: Tensor, embedded: Tensor) -> Tensor | None:
        """Return the own inputs of all layers, (B, S, layers, channels). None if layers have none.

        Each is the sum of the layer's own embedding and of a projection of the token's embedding, divided by sqrt(2).
        """
        if self.layer_embeddings is None:
            return None
        each = self.args.n_layers, self.args.per_layer_dim
        own = _scaled(self.layer_embeddings(tokens), self.args.per_layer_dim**0.5)
        context = self.layer_projection(embedded) * self.args.dim**-0.5
        context = self.layer_projection_norm(context.unflatten(-1, each))
        return (context + own.unflatten(-1, each)) * 2**-0.5

    def _freqs_cis(
        self, tokens: Tensor, positions: Tensor | None, attention_plan: Tensor | None
    ) -> dict[float | None, Tensor]:
        """Return the rotary tables that the layers of this stage use, by their own base.

        The key None has the table of the model. A table has a row for each of `positions`, by default as in `forward`.
        """
        if positions is None and attention_plan is not None:
            positions = own_positions(attention_plan, tokens.device)
        elif positions is None:
            # With tensor parallelism, the hidden states of a later stage may have only some of the sequence.
            length = self.args.max_seq_len if self.tok_embeddings is None else tokens.shape[1]
            positions = torch.arange(length, device=tokens.device)
        used = {layer.theta for layer in self.layers.values()}
        return {
            theta: freqs_cis_at(
                positions,
                self.get_buffer(_own(theta)),
                self.args.rope_scaling if theta is None else None,
                self.rotary_dtype,
                unrotated=self.args.rotary_sizes(theta)[1],
            )
            for theta in self.thetas
            if theta in used
        }

    def init_buffers(self, device: torch.device) -> None:
        """Compute the frequencies, and set the buffers of routers and the scalars of layers, replacing earlier ones.

        Args:
            device: The device of the buffers.
        """
        self.rotary_dtype = wide_type(next(self.parameters()).dtype)
        self._set_frequencies(self.args.max_seq_len, device)
        for layer in self.layers.values():
            if layer.layer_scalar is not None:
                layer.layer_scalar = torch.ones(1, dtype=self.rotary_dtype, device=device)
        for router in routers_of([self]).values():
            router.init_buffers(device)

    def rotate_for(self, length: int) -> float:
        """Set the frequencies for a text of `length` tokens.

        With `by_length`, LongRoPE uses its short factors up to the original length, and the long factors beyond it.
        Else nothing changes, and the result is infinity.

        Args:
            length: Number of tokens of the text.

        Returns:
            The longest text for which these frequencies hold, in tokens; infinity if there is no bound.
        """
        scaling = self.args.rope_scaling
        if not self.by_length or scaling is None or scaling.kind != "longrope":
            return math.inf
        self._set_frequencies(length, self.frequencies.device)
        return (
            scaling.original_max_seq_len if length <= scaling.original_max_seq_len else math.inf
        )

    def _set_frequencies(self, longest: int, device: torch.device) -> None:
        args = self.args
        for theta in self.thetas:
            rotated, unrotated = args.rotary_sizes(theta)
            kind = (args.rope_theta, args.rope_scaling) if theta is None else (theta, None)
            frequencies = rope_frequencies(rotated, *kind, unrotated, longest)
            setattr(self, _own(theta), frequencies.to(device))

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Draw embeddings that have unit scale after the forward's factor, and an output whose logits are small.

        Other parameters are set by `fill`.

        A tied matrix also makes the logits, so it is drawn with a small scale.

        Args:
            name: Name of the parameter in the model.
            parameter: The whole parameter, any shape, filled in place.
            generator: The source of random numbers.
        """
        if name == "tok_embeddings.weight":
            scale = 0.02 if self.args.tie_embeddings else 1.0 / self.args.embedding_scale
            parameter.normal_(0.0, scale, generator=generator)
        elif name == "layer_embeddings.weight":
            parameter.normal_(0.0, self.args.per_layer_dim**-0.5, generator=generator)
        elif name == "output.weight":
            parameter.normal_(0.0, 1.0 / parameter.shape[1], generator=generator)
        else:
            fill(name, parameter, generator)


def rotated_until(model: nn.Module, length: int) -> float:
    """Set the frequencies of any model for a text of `length` tokens.

    Args:
        model: The model; it may have a method `rotate_for`.
        length: Number of tokens of the text.

    Returns:
        The longest text for which the frequencies hold, in tokens; infinity if there is no bound.
    """
    rotate_for = getattr(model, "rotate_for", None)
    return math.inf if rotate_for is None else rotate_for(length)
