"""The Qwen3 mixtures of experts for the registry."""

from trainer.models.common.decoder_spec import decoder_spec
from trainer.models.qwen3_moe.args import HF

SPEC = decoder_spec("qwen3_moe", HF)
