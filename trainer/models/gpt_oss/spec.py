"""The gpt-oss family for the registry."""

from trainer.models.common.decoder_spec import decoder_spec
from trainer.models.gpt_oss.args import HF

SPEC = decoder_spec("gpt_oss", HF)
