"""Law: new special tokens are tokens of the copy's tokenizer, and rows that are the mean of those before."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.chat_files import CHATML, chat_folder
from tests.hf_decoders import hf_model
from trainer.commands.convert import main
from trainer.commands.main import main as lct
from trainer.config.loader import parse_command_line
from trainer.data.tokenizers.tokenizer import open_tokenizer
from trainer.families.decoder_args import TransformerArgs
from trainer.job import resolve

ARGS = TransformerArgs(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, ffn_hidden_dim=48, max_seq_len=64)
TOKENS = ["<|tool|>", "<|result|>"]


def folder_with(path: Path, rows: int, *, tied: bool = False) -> Path:
    """A model with a tokenizer of 314 tokens."""
    args = ARGS.configured(parse_command_line([]).config.model, vocab_size=rows, max_seq_len=64)
    model = hf_model("llama3", args)
    model.config.tie_word_embeddings = tied
    if tied:
        model.tie_weights()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.5)
    model.save_pretrained(path)
    return chat_folder(path, CHATML)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(path / "model.safetensors")


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [(314, 316), (315, 316), (316, 316), (320, 320), (312 + 64, 376)],
)
def test_rows_are_the_mean_and_all_else_is_as_before(tmp_path: Path, rows: int, wanted: int) -> None:
    """Spare rows are used; added ones keep the factor by which tensor parallelism divides them."""
    source, made = folder_with(tmp_path / "given", rows), tmp_path / "made"
    assert main(["add-tokens", str(source), str(made), "--tokens", *TOKENS]) == 0
    before, after = weights(source), weights(made)
    assert before.keys() == after.keys()
    for name, x in before.items():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert after[name].shape == (wanted, 32)
            mean = x[:314].double().mean(0)
            assert torch.equal(after[name][:314], x[:314])
            torch.testing.assert_close(after[name][314:].double(), mean.expand(wanted - 314, -1), rtol=1e-6, atol=0)
        else:
            assert torch.equal(after[name], x)
    tokenizer = AutoTokenizer.from_pretrained(made)
    assert tokenizer.convert_tokens_to_ids(TOKENS) == [314, 315]
    assert tokenizer("the <|tool|>fox")["input_ids"].count(314) == 1
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(source).chat_template
    model = AutoModelForCausalLM.from_pretrained(made)
    assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size == wanted


def test_a_job_trains_them(tmp_path: Path) -> None:
    """The tokenizer of the folder has them, and a text of a chat template too."""
    source, made = folder_with(tmp_path / "given", 314), tmp_path / "made"
    assert main(["add-tokens", str(source), str(made), "--tokens", *TOKENS]) == 0
    settings = [f"--model.path={made}", "--lora.rank=2", "--lora.whole", "tok_embeddings", "output"]
    job = resolve(parse_command_line([*settings, "--lora.modules", "wq"]).config, 1, "cpu")
    assert job.model.vocab_size == 316
    assert open_tokenizer(str(made)).encode_with_places("a<|tool|>", special=True)[0][-1] == 314
    assert job.task.memory(job).gradients == 4 * (2 * 316 * 32 + 2 * (32 + 32))


def test_tied_rows_are_one(tmp_path: Path) -> None:
    source, made = folder_with(tmp_path / "given", 314, tied=True), tmp_path / "made"
    assert main(["add-tokens", str(source), str(made), "--tokens", *TOKENS]) == 0
    assert "lm_head.weight" not in weights(made)
    settings = [f"--model.path={made}", "--lora.rank=2", "--lora.whole", "output", "--lora.modules", "wq"]
    job = resolve(parse_command_line(settings).config, 1, "cpu")
    assert job.task.memory(job).gradients == 4 * (316 * 32 + 2 * (32 + 32))


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (["<|end|>"], "'<|end|>' must be a name that the tokenizer does not have, once"),
        (["<|a|>", "<|a|>"], "'<|a|>' must be a name"),
        ([" "], "' ' must be a name"),
    ],
)
def test_what_is_no_new_token_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture, tokens: list[str], said: str
) -> None:
    source = folder_with(tmp_path / "given", 314)
    assert lct(["convert", "add-tokens", str(source), str(tmp_path / "made"), "--tokens", *tokens]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_a_folder_without_a_tokenizer_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = folder_with(tmp_path / "given", 314)
    (source / "tokenizer.json").unlink()
    assert lct(["convert", "add-tokens", str(source), str(tmp_path / "made"), "--tokens", *TOKENS]) == 2
    assert "has no tokenizer.json to which tokens can be added" in capsys.readouterr().err


def test_the_settings_name_them_for_older_readers(tmp_path: Path) -> None:
    source, made = folder_with(tmp_path / "given", 314), tmp_path / "made"
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(settings | {"added_tokens_decoder": {}}))
    assert main(["add-tokens", str(source), str(made), "--tokens", *TOKENS]) == 0
    assert json.loads((made / "tokenizer_config.json").read_text())["added_tokens_decoder"]["314"]["special"] is True
    assert AutoTokenizer.from_pretrained(made).convert_tokens_to_ids(TOKENS) == [314, 315]
