"""Laws of a start from adapters of peft: other options are one sentence, and the table of names has an inverse."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.distributed.test_hugging_face import LLAMA
from trainer.checkpoint.peft_table import peft_model
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.families.registry import flavor_args
from trainer.job import resolve
from trainer.job.summary import summary
from trainer.models.model_spec import model_spec
from trainer.transforms.lora import apply_lora, is_adapter

pytestmark = pytest.mark.about("trainer/checkpoint/peft_table.py", "trainer/stores/initial_weights.py")
RIGHT = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
"""What peft writes, without the options that are off."""
LORA = ["--lora.rank=4", "--lora.alpha=8", "--lora.modules", "wq", "wv"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = LlamaConfig(vocab_size=LLAMA.vocab_size, num_key_value_heads=4, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def adapters(folder: Path, *, modules: tuple[str, ...] = ("q_proj", "v_proj"), **options: Any) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(RIGHT | options))
    tensors = {}
    for layer in range(2):
        for module in modules:
            outputs = {"q_proj": 64, "v_proj": 32, "k_proj": 32}[module]
            before = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{before}.lora_A.weight"] = torch.randn(4, 64)
            tensors[f"{before}.lora_B.weight"] = torch.randn(outputs, 4)
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def job(base: Path, start: Path, *arguments: str):
    settings = [f"--model.path={base}", f"--checkpoint.initial_load_path={start}", "--training.seq_len=64"]
    return resolve(parse_command_line([*settings, *arguments]).config, 1, "cpu")


def refusal(*arguments: Any) -> str:
    with pytest.raises(ConfigError) as error:
        job(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_adapters_of_the_run_are_taken(base, tmp_path):
    start = adapters(tmp_path / "a", use_dora=False, rank_pattern={}, init_lora_weights=True, lora_dropout=0.1)
    assert f"of {base}, adapters of {start}" in summary(job(base, start, *LORA), width=1000)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lora.rank=8", *LORA[1:]], "has adapters with lora.rank = 4, and this run has 8; write lora.rank = 4"),
        ([LORA[0], "--lora.alpha=16", *LORA[2:]], "lora.alpha = 8, and this run has 16.0; write lora.alpha = 8"),
        (
            [*LORA, "wk"],
            "lora.modules = ['wq', 'wv'], and this run has ['wk', 'wq', 'wv']; write lora.modules = ['wq', 'wv']",
        ),
        (LORA[:2], "and this run has ['w1', 'w2', 'w3', 'wk', 'wo', 'wq', 'wv']; write lora.modules = ['wq', 'wv']"),
        ([*LORA, "--lora.whole", "output"], "lora.whole = [], and this run has ['output']; write lora.whole = []"),
        ([], "has adapters with lora.rank = 4, and this run has 0; write lora.rank = 4"),
    ],
)
def test_other_adapters_than_the_run_s_are_one_sentence(base, tmp_path, arguments, said):
    assert said in refusal(base, adapters(tmp_path / "a"), *arguments)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_dora": True}, "use_dora = True is an option of peft that is not read"),
        ({"bias": "all"}, "bias = 'all' is an option of peft that is not read"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern = {'q_proj': 8} is an option of peft that is not read"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' is an option of peft that is not read"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3' is an option of peft that is not read"),
        ({"layers_to_transform": [0]}, "layers_to_transform = [0] is an option of peft that is not read"),
        ({"option_of_tomorrow": 1}, "option_of_tomorrow = 1 is an option of peft that is not read"),
    ],
)
def test_an_option_that_is_not_read_is_refused_by_its_name(base, tmp_path, options, said):
    assert said in refusal(base, adapters(tmp_path / "a", **options), *LORA)


def test_rslora_is_a_larger_alpha(base, tmp_path):
    """Peft divides by the square root of the rank then, 2, and a run here by the rank, 4."""
    start = adapters(tmp_path / "a", use_rslora=True)
    assert "lora.alpha = 16.0, and this run has 8.0; write lora.alpha = 16.0" in refusal(base, start, *LORA)
    job(base, start, *LORA, "--lora.alpha=16")


def test_a_pickle_is_refused(base, tmp_path):
    start = adapters(tmp_path / "a")
    (start / "adapter_model.safetensors").rename(start / "adapter_model.bin")
    assert "a lacks adapter_model.safetensors, and a pickle (.bin) is not read" in refusal(base, start, *LORA)


def test_the_weights_that_are_adapted_must_be_named(tmp_path):
    start = adapters(tmp_path / "a")
    config = parse_command_line([f"--checkpoint.initial_load_path={start}", *LORA]).config
    with pytest.raises(ConfigError, match=r"name the folder of these in model\.path"):
        resolve(config, 1, "cpu")


@pytest.mark.parametrize(
    ("family", "modules"),
    [("llama3", ()), ("qwen3_moe", ("wq", "w13", "w2")), ("qwen3_moe", ("w13",)), ("gpt_oss", ("wv", "w13", "w2"))],
)
def test_the_table_is_its_own_inverse(tmp_path, family, modules):
    """What a run writes, it reads: each tensor by its names there, in the layout there."""
    settings = [f"--model.name={family}", "--lora.rank=4", "--lora.whole", "output"]
    settings += ["--lora.modules", *modules] if modules else []
    config = parse_command_line([*settings, f"--checkpoint.initial_load_path={tmp_path}"]).config
    args = flavor_args(config.model)
    with torch.device("meta"):
        model = model_spec(family).build(args)
        apply_lora(model, config.lora)
    trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
    table = peft_model(config, args).pairs
    assert table.keys() == trained.keys()
    assert any(is_adapter(name) for name in table)
    names = [hf.name for _, hf in table.values()]
    assert len(set(names)) == len(names)
    for name, (ours, hf) in table.items():
        x = torch.randn(ours.shape)
        (there,) = hf.tensors(x).values()
        assert torch.equal(hf.from_hf(there), x), name
