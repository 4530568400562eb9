"""Law: with the weights of a Hugging Face folder, LongRoPE goes by the length of each text, as in transformers."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers

from lct_inference.generate import checked
from lct_inference.generation import Sampling, Writing, generate
from tests.hf_families import MODELS, hf_decoder
from tests.unit.saved_runs import saved_run
from trainer.commands.finished_run import loaded_model
from trainer.commands.main import main as lct
from trainer.data.tokenizers.tokenizer import default_tokenizer_path, open_tokenizer
from trainer.runtime.process_group import Process, process_group

NAME = "phi3, LongRoPE"  # original length 16, longest 64
PROMPTS = ("import os", "def f(x):\n    return x", "a" + " b c d e f g h i j k l m n o p q r s t")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("phi3") / "hf"
    family, args = MODELS[NAME]
    hf_decoder(family, args).float().save_pretrained(path)
    shutil.copy(default_tokenizer_path(), path / "tokenizer.model")
    return path


def test_greedy_texts_are_those_of_transformers_over_the_original_length(folder: Path, capsys) -> None:
    tokenizer = open_tokenizer(str(folder))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    wanted = []
    for prompt in PROMPTS:
        ids = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(prompt)]])
        out = theirs.generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=tokenizer.eos_id, pad_token_id=0)
        assert out.shape[1] > 17
        wanted.append(tokenizer.decode(out[0, 1:].tolist()))
    asked = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    assert lct(["generate", str(folder), *asked, "--tokens", "30", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "\n\n".join(wanted) + "\n"


def test_a_run_keeps_the_factors_of_its_training(folder: Path, tmp_path: Path) -> None:
    """It has trained on short texts with the factors of its longest."""
    run = tmp_path / "run"
    saved_run(run, f"--model.path={folder}", "--training.seq_len=64")
    assert [by_length(path) for path in (folder, run)] == [16, float("inf")]


def by_length(path: Path) -> float:
    """The longest text with the frequencies of a text of three tokens."""
    _, job = checked([str(path)])
    process = Process.from_environment()
    with process_group(process, job.config.comm):
        model, _ = loaded_model(job, process.device)
        return model.rotate_for(3)


def test_what_is_told_of_several_prompts_names_each_of_them(folder: Path) -> None:
    """They are continued one by one, because each text has frequencies for its own length."""
    _, job = checked([str(folder)])
    process = Process.from_environment()
    reported: list[tuple[int, int, int]] = []
    read: list[tuple[int, ...]] = []
    with process_group(process, job.config.comm):
        model, dims = loaded_model(job, process.device)
        how = Writing(
            tokens=2,
            sampling=Sampling(temperature=0),
            seed=0,
            on_token=lambda prompt, token, logits: reported.append((prompt, token, int(logits.argmax()))),
            on_prompt=lambda start, logits: read.append((start, *logits.shape[:2])),
        )
        texts = generate(model, job, dims, [[1, 2, 3], [4, 5]], how)
    assert reported == [(number, token, token) for number, text in enumerate(texts) for token in text]
    assert read == [(0, 1, 3), (0, 1, 2)]
