"""Law: adapters over frozen weights in four bits train as adapters over the dequantised weights, on every layout."""

import sys
from pathlib import Path

import pytest
import torch
import transformers
from bitsandbytes.functional import dequantize_4bit
from torch import nn
from transformers import BitsAndBytesConfig, LlamaForCausalLM

from tests.distributed.pool import WorkerPool
from tests.distributed.test_hugging_face import error
from tests.distributed.test_lora import exported, train
from tests.distributed.test_parity import LAYOUTS
from tests.slow import slow
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.config.schema import LoRA
from trainer.families.decoder_args import TransformerArgs
from trainer.job import resolve
from trainer.models.model_spec import model_spec
from trainer.transforms import lora, quantized

pytestmark = pytest.mark.about("trainer/transforms/quantized.py")

QUANTIZE = "--lora.quantize=nf4"
WIDE = transformers.LlamaConfig(
    vocab_size=4354,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    attention_bias=True,
    max_position_embeddings=16,
    bos_token_id=1,
    eos_token_id=2,
)


def dequantised(weight: torch.Tensor) -> torch.Tensor:
    """The definition: of each 64 weights of a row, the nearest of 16 values times the largest absolute value."""
    values = [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0]
    values += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
    table = torch.tensor(values)
    blocks = weight.float().view(-1, quantized.NF4_BLOCK)
    scales = blocks.abs().amax(1, keepdim=True)
    codes = ((blocks / scales.clamp(min=1e-30)).unsqueeze(-1) - table).abs().argmin(-1)
    return (table[codes] * scales).view(weight.shape)


def packed_and_unpacked(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the packed weight of a module, and what it stands for in float32."""
    with torch.device("meta"):
        module = nn.Linear(*reversed(weight.shape))
    quantized.quantize_linear(module, dtype)
    module.to_empty(device="cpu")
    unpacked = quantized.empty_like_unpacked(module.weight).copy_(weight)
    quantized.pack_into(module.weight, unpacked)
    return module.weight, quantized.unpacked(module.weight, torch.float32)


def test_a_packed_weight_stands_for_the_nearest_values() -> None:
    """In each dtype of FSDP, also for a block of zeros, and for no row at all."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for shape in ((5, 192), (1, 64), (0, 128)):
            weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            weight[3:, :64] = 0.0
            packed, got = packed_and_unpacked(weight, dtype)
            assert torch.allclose(got, dequantised(weight), rtol=1e-6, atol=0.0)
            bits = 8 * packed.numel() * dtype.itemsize
            assert bits == weight.numel() * (5 if dtype == torch.float64 else 4.5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same model with dequantised weights."""
    folder = tmp_path_factory.mktemp("quantized")
    torch.manual_seed(0)
    model = LlamaForCausalLM(WIDE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(float(parameter.ndim == 1), 0.1)
        model.save_pretrained(folder / "hf")
        for module in model.model.layers.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(packed_and_unpacked(module.weight, torch.float32)[1])
    model.save_pretrained(folder / "dequantised")
    return folder / "hf", folder / "dequantised"


@pytest.fixture(scope="module")
def wanted(pool: WorkerPool, folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict:
    """One process with adapters over the dequantised weights."""
    return pool.run(1, train, str(tmp_path_factory.mktemp("wanted") / "run"), str(folders[1]), [])[0]


def differences(got: dict, wanted: dict, most: float = 1e-10) -> list[str]:
    """Return the names of gradients, adapters and numbers of steps that differ by more, relative to their norm."""
    pairs = [*zip(got["gradients"], wanted["gradients"], strict=True)]
    pairs.append(tuple({name: x for name, x in run["after"].items() if lora.is_adapter(name)} for run in (got, wanted)))
    for lines in zip(got["metrics"], wanted["metrics"], strict=True):
        pairs.append(tuple({key: torch.tensor(line[key]) for key in ("loss", "grad_norm")} for line in lines))
    names = []
    for ours, theirs in pairs:
        assert ours.keys() == theirs.keys()
        names += [name for name, x in theirs.items() if not (ours[name] - x).norm() <= most * x.norm()]
    return names


RECOMPUTED = "--activation_checkpoint.mode=full"
COMPILED = ["--compile.enable", "--compile.backend=aot_eager"]
CASES = {
    "one": (1, []),
    "fsdp2+cp2": LAYOUTS["fsdp2+cp2"],
    "cp2+tp2": LAYOUTS["cp2+tp2"],
}
SLOW_CASES = {
    **{layout: LAYOUTS[layout] for layout in ("fsdp2", "cp2", "tp2", "pp2", "hsdp2x2", "fsdp2+tp2", "tp2+pp2")},
    "compiled": (1, COMPILED),
    "recomputed, compiled": (2, [*LAYOUTS["cp2"][1], RECOMPUTED, *COMPILED]),
    "selective": (1, ["--activation_checkpoint.mode=selective"]),
    "on the host": (2, [*LAYOUTS["fsdp2"][1], "--training.enable_cpu_offload"]),
    "parts of a sequence": (1, ["--training.sequence_chunks=3"]),
    "uneven": (3, ["--parallelism.data_parallel_shard_degree=1", "--parallelism.context_parallel_degree=3"]),
}


@pytest.mark.parametrize("case", [*CASES, *slow(*SLOW_CASES)])
def test_adapters_train_as_over_the_dequantised_weights(
    pool: WorkerPool, folders: tuple[Path, Path], wanted: dict, tmp_path: Path, case: str
) -> None:
    ranks, arguments = (CASES | SLOW_CASES)[case]
    got = pool.run(ranks, train, str(tmp_path / "run"), str(folders[0]), [QUANTIZE, *arguments])[0]
    assert differences(got, wanted) == []


@pytest.mark.slow
def test_dropout_beside_weights_in_four_bits(pool: WorkerPool, folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Some modules have an adapter; the others of the layers have four bits too."""
    options = ["--lora.dropout=0.3", "--lora.modules", "wq", "w2"]
    wanted = pool.run(1, train, str(tmp_path / "wanted"), str(folders[1]), options)[0]
    ranks, arguments = LAYOUTS["cp2+tp2"]
    got = pool.run(ranks, train, str(tmp_path / "run"), str(folders[0]), [QUANTIZE, *options, *arguments])[0]
    assert differences(got, wanted) == []


def test_the_comparison_sees_the_rounding(
    pool: WorkerPool, folders: tuple[Path, Path], wanted: dict, tmp_path: Path
) -> None:
    """The folder's own weights have other gradients. An export adds the adapters to these, and not to rounded ones."""
    plain = pool.run(1, train, str(tmp_path / "plain"), str(folders[0]), [])[0]
    assert "layers.0.attention.wq.lora_b" in differences(plain, wanted, most=1e-2)
    got = pool.run(1, train, str(tmp_path / "run"), str(folders[0]), [QUANTIZE])[0]
    name = "layers.1.feed_forward.w2"
    a, b = (got["after"][f"{name}.{part}"] for part in (lora.A, lora.B))
    start = LlamaForCausalLM.from_pretrained(folders[0]).model.layers[1].mlp.down_proj.weight.double()
    assert error(exported(got)["model.layers.1.mlp.down_proj.weight"], start + 2.0 * (b @ a)) < 1e-6


def test_transformers_rounds_to_the_same_bits(folders: tuple[Path, Path]) -> None:
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    theirs = LlamaForCausalLM.from_pretrained(folders[0], quantization_config=options, dtype=torch.float32)
    ours = dict(LlamaForCausalLM.from_pretrained(folders[1]).named_modules())
    packed = {name: x.weight for name, x in theirs.named_modules() if type(x).__name__ == "Linear4bit"}
    assert len(packed) == 7 * 2
    for name, weight in packed.items():
        assert torch.equal(dequantize_4bit(weight.data, weight.quant_state), ours[name].weight)


def test_modules_without_an_adapter_have_four_bits_too() -> None:
    """All linear modules of layers except routers; none elsewhere."""
    settings = LoRA(rank=2, quantize="nf4", modules=("wq",))
    flavor = {"dim": 64, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "ffn_hidden_dim": 128, "vocab_size": 256}
    with torch.device("meta"):
        model = model_spec("llama3").build(TransformerArgs(**flavor, max_seq_len=16))
        model.layers["0"].feed_forward.gate = nn.Linear(64, 4)
    lora.apply_lora(model, settings, quantized_for=torch.float32)
    names = {name.removesuffix(".weight") for name, _ in quantized.quantized_weights([model])}
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert names == linear - {"output", "layers.0.feed_forward.gate"}


def test_bad_input_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A width of no blocks, and a machine without the package."""
    small = ["--parallelism.tensor_parallel_degree=8", "--lora.rank=4", QUANTIZE, "--checkpoint.initial_load_path=."]
    with pytest.raises(ConfigError, match=r"layers\.0\.attention\.wo has 32; use a smaller"):
        resolve(parse_command_line(small).config, 8, "cpu")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"lora\.quantize = 'nf4' needs bitsandbytes .* pip install '\.\[qlora\]'"):
        quantized.check_quantization_package(LoRA(rank=4, quantize="nf4"))
    with pytest.raises(ConfigError, match=r"needs bitsandbytes"):  # commands that read a run ask here first
        quantized.quantize_linear(nn.Linear(64, 1, device="meta"), torch.float32)
    quantized.check_quantization_package(LoRA(rank=4))
