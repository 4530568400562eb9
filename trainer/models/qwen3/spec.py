"""The Qwen3 family for the registry."""

from trainer.models.common.decoder_spec import decoder_spec
from trainer.models.qwen3.args import HF

SPEC = decoder_spec("qwen3", HF)
