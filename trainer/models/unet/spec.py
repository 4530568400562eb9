"""The U-Net family for the registry."""

from trainer.models.common.fields import parallelize_fields
from trainer.models.model_spec import ModelSpec
from trainer.models.unet.model import UNet

SPEC = ModelSpec(name="unet", build=UNet, parallelize=parallelize_fields)
