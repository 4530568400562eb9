"""What the trainer calls of a family that is the decoder of this folder with arguments of its own."""

from trainer.families.decoder_tensors import hf_tensor
from trainer.models.decoder import Transformer
from trainer.models.model_spec import ModelSpec
from trainer.models.moe import ExpertBalance
from trainer.models.parallelize import keep_stage, parallelize_decoder

SPEC = ModelSpec(
    build=Transformer,
    keep_stage=keep_stage,
    parallelize=parallelize_decoder,
    state_dict_adapter=hf_tensor,
    observer=ExpertBalance,
)
