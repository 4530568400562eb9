"""The toy family, as the registry finds it."""

from tests.toy_family.model import ToyDecoder
from trainer.models.common.parallelize import parallelize_decoder
from trainer.models.common.stages import keep_stage
from trainer.models.model_spec import ModelSpec

SPEC = ModelSpec(
    name="toy",
    build=ToyDecoder,
    keep_stage=keep_stage,
    parallelize=parallelize_decoder,
    cp_buffers=lambda part: [(part.freqs_cis, 0)],
)
