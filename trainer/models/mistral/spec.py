"""The Mistral family for the registry."""

from trainer.models.common.decoder_spec import decoder_spec
from trainer.models.mistral.args import HF

SPEC = decoder_spec("mistral", HF)
