"""The specification of the toy family, which the registry loads."""

from collections.abc import Sequence

import torch

from examples.toy_family.args import ToyArgs
from examples.toy_family.model import ToyDecoder
from longshard.sharding.exchange import all_reduce
from trainer.hugging_face.pairs import HFTensor
from trainer.models.model_spec import ModelSpec
from trainer.models.parallelize import keep_stage, parallelize_decoder
from trainer.observer import Observer
from trainer.parallel.parallel_dims import ParallelDims


class ChannelBalance(Observer):
    """Moves the biases by the share of positive channels in the whole batch.

    Args:
        parts: This rank's parts of the model.
        dims: The meshes of the job.
    """

    def __init__(self, parts: Sequence[ToyDecoder], dims: ParallelDims) -> None:
        self.layers = [layer for part in parts for layer in part.layers.values()]
        self.dims = dims

    def end_step(self, left_out: torch.Tensor) -> None:
        for layer in self.layers:
            positive, tokens = all_reduce(all_reduce(layer.counts, self.dims["dp_cp"]), self.dims["tp"])
            layer.bias += torch.where(left_out.bool(), 0, 0.1 * (0.5 - positive / tokens))
            layer.counts.zero_()


def hf_tensor(args: ToyArgs, name: str) -> HFTensor:
    """Return the name of a tensor in Hugging Face's files. The matrices of attention are transposed there.

    Args:
        args: Sizes of the model.
        name: Name of the tensor here.
    """
    if ".attention.w" in name and name.endswith(".weight"):
        return HFTensor(f"toy.{name}", torch.t, torch.t)
    return HFTensor(f"toy.{name}")


SPEC = ModelSpec(
    build=ToyDecoder,
    keep_stage=keep_stage,
    parallelize=parallelize_decoder,
    cp_buffers=lambda part: [(part.freqs_cis, 0)],
    state_dict_adapter=hf_tensor,
    observer=ChannelBalance,
)
