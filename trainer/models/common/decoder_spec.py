"""What the trainer calls of a family that is the decoder of `models/common` with arguments of its own."""

from trainer.models.common.decoder import Transformer
from trainer.models.common.decoder_args import TransformerArgs
from trainer.models.common.decoder_hf_config import HFDecoder
from trainer.models.common.decoder_state_dict import counterpart
from trainer.models.common.moe import ExpertBalance
from trainer.models.common.parallelize import parallelize_decoder
from trainer.models.common.stages import keep_stage
from trainer.models.model_spec import Counterpart, ModelSpec


def decoder_spec(name: str, there: HFDecoder) -> ModelSpec:
    """Return the spec of a family, which is `there` at Hugging Face."""

    def checked_counterpart(args: TransformerArgs, parameter: str) -> Counterpart | None:
        there.check_start(args)  # what is written is checked as a whole
        return counterpart(args, parameter)

    return ModelSpec(
        name=name,
        build=Transformer,
        keep_stage=keep_stage,
        parallelize=parallelize_decoder,
        cp_buffers=lambda part: [(part.freqs_cis, 0)],
        state_dict_adapter=checked_counterpart,
        observer=ExpertBalance,
    )
