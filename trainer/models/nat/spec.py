"""The neighbourhood-attention family for the registry."""

from functools import partial

from trainer.models.common.fields import parallelize_fields
from trainer.models.model_spec import ModelSpec
from trainer.models.nat.model import NAT

# Linear modules of a layer, by the dimension of their weight that tensor parallelism shards.
_SHARDED = {
    "attention.wq": 0,
    "attention.wk": 0,
    "attention.wv": 0,
    "attention.wo": 1,
    "feed_forward.w1": 0,
    "feed_forward.w2": 1,
}

SPEC = ModelSpec(name="nat", build=NAT, parallelize=partial(parallelize_fields, sharded=_SHARDED))
