"""A family of models that only the tests know: what Llama is not, made of this folder and one line in the registry.

Heads of an explicit size, biases everywhere, LayerNorm with a bias, rotary positions on halves.
"""
