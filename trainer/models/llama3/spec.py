"""The Llama 3 family for the registry."""

from trainer.models.common.parallelize import parallelize_decoder
from trainer.models.common.stages import keep_stage
from trainer.models.llama3.model import Transformer
from trainer.models.llama3.state_dict import counterpart
from trainer.models.model_spec import ModelSpec

SPEC = ModelSpec(
    name="llama3",
    build=Transformer,
    keep_stage=keep_stage,
    parallelize=parallelize_decoder,
    cp_buffers=lambda part: [(part.freqs_cis, 0)],
    state_dict_adapter=counterpart,
)
