"""The Llama 3 family for the registry."""

from trainer.models.common.decoder_spec import decoder_spec
from trainer.models.llama3.args import HF

SPEC = decoder_spec("llama3", HF)
