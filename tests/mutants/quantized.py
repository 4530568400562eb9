"""Table of mistakes in frozen weights of four bits."""

from tests.mutants.mutant import Mutant

_MODULE = "trainer/transforms/quantized.py"
_TESTS = "tests/distributed/test_quantized.py"
_LAYOUTS = f"{_TESTS}::test_adapters_train_as_over_the_dequantised_weights"

QUANTIZED = (
    Mutant(
        "ranks with a part of the outputs keep their part of the gradient",
        _MODULE,
        "gradient = [Partial()] if cut == Shard(0) else x.placements",
        "gradient = x.placements",
        f"{_LAYOUTS}[cp2+tp2]",
    ),
    Mutant(
        "the backward rounds weights to bfloat16",
        _MODULE,
        "return grad @ unpacked(packed, grad.dtype), None",
        "return grad @ unpacked(packed, torch.bfloat16).to(grad.dtype), None",
        f"{_LAYOUTS}[one]",
    ),
    Mutant(
        "the bias is left out",
        _MODULE,
        "return product if module.bias is None else product + module.bias",
        "return product",
        f"{_LAYOUTS}[one]",
    ),
    Mutant(
        "a block has the scale of the first block",
        _MODULE,
        "blocks[:, _CODES:NF4_BYTES] = scales.view(-1, 1).view(torch.uint8)",
        "blocks[:, _CODES:NF4_BYTES] = scales[:1].view(-1, 1).view(torch.uint8)",
        f"{_TESTS}::test_a_packed_weight_stands_for_the_nearest_values",
    ),
    Mutant(
        "modules without an adapter keep whole weights",
        "trainer/transforms/lora.py",
        "and settings.quantizes(name)",
        "and settings.quantizes(name) and settings.adapts(name)",
        f"{_TESTS}::test_modules_without_an_adapter_have_four_bits_too",
    ),
    Mutant(
        "the scale of rsLoRA in an older checkpoint is forgotten",
        "trainer/stores/state.py",
        'model["lora.alpha"] *= math.sqrt(model["lora.rank"])',
        'model["lora.alpha"] *= 1',
        "tests/unit/test_finished_run.py::test_an_older_checkpoint_with_rslora_has_a_larger_alpha",
    ),
)
