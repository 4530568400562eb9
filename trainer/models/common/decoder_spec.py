"""What the trainer calls of a family that is the decoder of `models/common` with arguments of its own."""

from trainer.hugging_face.tensors import HFTensor
from trainer.models.common.decoder import Transformer
from trainer.models.common.decoder_args import TransformerArgs
from trainer.models.common.decoder_config_json import HFDecoder
from trainer.models.common.decoder_tensors import hf_tensor
from trainer.models.common.moe import ExpertBalance
from trainer.models.common.parallelize import parallelize_decoder
from trainer.models.common.stages import keep_stage
from trainer.models.model_spec import ModelSpec


def decoder_spec(name: str, there: HFDecoder) -> ModelSpec:
    """Return the spec of a family, which is `there` at Hugging Face."""

    def checked_tensor(args: TransformerArgs, parameter: str) -> HFTensor | None:
        there.check_start(args)  # what is written is checked as a whole
        return hf_tensor(args, parameter)

    return ModelSpec(
        name=name,
        build=Transformer,
        keep_stage=keep_stage,
        parallelize=parallelize_decoder,
        cp_buffers=lambda part: [(part.freqs_cis, 0)],
        state_dict_adapter=checked_tensor,
        observer=ExpertBalance,
    )
