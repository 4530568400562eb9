"""A model family from outside, which `--job.imports examples.my_llama` adds: docs/your_own_model.md explains it.

This file imports no PyTorch, so that a wrong setting is reported at once.
"""

from trainer.extensions import register_model, register_observer
from trainer.families.decoder_args import TransformerArgs

FLAVORS = {"small": TransformerArgs(dim=128, n_layers=4, n_heads=4, n_kv_heads=2, ffn_hidden_dim=320)}
register_model("my_llama", FLAVORS, spec=f"{__name__}.model")
register_observer(f"{__name__}.watch:LargestWeight")
