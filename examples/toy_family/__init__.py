"""A model family outside the program, which differs from Llama in many ways. This folder alone adds it.

    lct train --job.imports examples.toy_family --model.name toy --model.flavor toy

Differences: heads of an explicit size, biases everywhere, LayerNorm with a bias, rotary positions on halves. A balance
of channels changes after each step. Hugging Face's files have other names and layouts.
"""

from examples.toy_family.args import FLAVORS
from trainer.extensions import register_model

register_model("toy", FLAVORS, spec="examples.toy_family.spec")
