"""A model family outside the program: what Llama is not, added by this folder alone.

    lct train --job.imports examples.toy_family --model.name toy --model.flavor toy

Heads of an explicit size, biases everywhere, LayerNorm with a bias, rotary positions on halves, a balance of channels
that changes after each step, and other names and layouts in Hugging Face's files.
"""

from examples.toy_family.args import FLAVORS
from trainer.extensions import register_model

register_model("toy", FLAVORS, spec="examples.toy_family.spec")
