"""The model, as single-device code. Parallelism is applied from outside, by the module names of the shared decoder."""

import torch
import torch.nn.functional as F

from trainer.families.decoder_args import TransformerArgs
from trainer.models.decoder import Transformer
from trainer.models.feed_forward import FeedForward
from trainer.models.model_spec import ModelSpec
from trainer.models.parallelize import keep_stage, parallelize_decoder


class SquaredReLU(FeedForward):
    """A gated feed-forward network with the square of a ReLU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.relu(self.w1(x)).square() * self.w3(x))


class MyLlama(Transformer):
    """A Llama with other feed-forward networks.

    Args:
        args: The sizes.
    """

    def __init__(self, args: TransformerArgs) -> None:
        super().__init__(args)
        for layer in self.layers.values():
            dense = args.layer(0).feed_forward  # the record of a layer: its mixer, feed-forward network and norms
            layer.feed_forward = SquaredReLU(args.dim, dense, branches=2 * args.n_layers)


SPEC = ModelSpec(build=MyLlama, parallelize=parallelize_decoder, keep_stage=keep_stage)
