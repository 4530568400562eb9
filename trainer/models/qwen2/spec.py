"""The Qwen2 family for the registry."""

from trainer.models.common.decoder_spec import decoder_spec
from trainer.models.qwen2.args import HF

SPEC = decoder_spec("qwen2", HF)
