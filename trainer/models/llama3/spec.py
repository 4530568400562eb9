"""The Llama 3 family, as the registry finds it."""

from trainer.models.llama3.args import FLAVORS, TransformerArgs
from trainer.models.llama3.model import Transformer
from trainer.models.llama3.parallelize import parallelize
from trainer.models.llama3.pipeline import keep_stage
from trainer.models.model_spec import ModelSpec

SPEC = ModelSpec(
    name="llama3",
    flavors=FLAVORS,
    build=Transformer,
    keep_stage=keep_stage,
    parallelize=parallelize,
    cp_buffers=lambda part: [(part.freqs_cis, 0)],
    flops_per_token=TransformerArgs.flops_per_token,
)
