"""Law: an exported folder has the tokenizer of the run as transformers reads it, and names all ends of a text."""

import inspect
import json
import random
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig

from lct_tools.tokenizer import main as tokenizer_command
from tests.chat_files import CHATML, chat_folder
from tests.hf_decoders import LLAMA, saved
from tests.unit.saved_runs import saved_run
from trainer.commands.convert import main as convert
from trainer.commands.main import main as lct
from trainer.data.tokenizers.tokenizer import default_tokenizer_path, open_tokenizer

TEXTS = (
    "import os\n\n\ndef f(x):\n\treturn x ** 2  # naïve\r\n",
    "don't I'LL we've 1234567 3.14159 ---===>>> (a)[b]{c}",
    "  leading, trailing   \n\n \t \n   ",
    "日本語のテキスト, Привет мир, مرحبا, हिन्दी, 🙂👩‍👩‍👧‍👦 ﬁ İ ß",
    "aaaaaaaaaaaaaaaaaaaaaa " + "=" * 77 + "\u00a0\u2003\u3000x\u200b\ufeff\x00\x7f",
    inspect.getsource(random),
)


@pytest.fixture(scope="module")
def own_ranks(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "text.txt").write_text("\n".join(TEXTS) + inspect.getsource(json))
    output = folder / "own.tiktoken"
    text = ["--dataset", "text", "--path", str(folder / "text.txt")]
    assert tokenizer_command(["train", *text, "--vocab-size", "600", "--output", str(output)]) == 0
    return str(output)


def run_and_export(folder: Path, *arguments: str) -> Path:
    run, out = folder / "run", folder / "out"
    saved_run(run, "--training.seq_len=64", *arguments)
    assert convert(["to-hf", str(run), str(out)]) == 0
    return out


def random_texts() -> list[str]:
    draw = random.Random(0)
    letters = "aeinrst  \n\t.,'()_=0123日é🙂\u00a0"
    return ["".join(draw.choices(letters, k=200)) for _ in range(50)]


@pytest.mark.parametrize("which", ["shipped", "own"])
def test_transformers_reads_the_tokenizer_of_a_rank_file(tmp_path: Path, own_ranks: str, capsys, which: str) -> None:
    path = own_ranks if which == "own" else default_tokenizer_path()
    out = run_and_export(tmp_path, *([f"--model.tokenizer_path={path}"] if which == "own" else []))
    ours, theirs = open_tokenizer(path), AutoTokenizer.from_pretrained(out)
    for text in (*TEXTS, *random_texts()):
        ids = ours.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == ids
        assert theirs.encode(text) == [ours.bos_id, *ids]
        assert theirs.decode(ids) == ours.decode(ids) == text
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
    assert len(theirs) == ours.vocab_size
    again = open_tokenizer(str(out))
    assert (again.bos_id, again.eos_id, again.vocab_size) == (ours.bos_id, ours.eos_id, ours.vocab_size)
    ends = GenerationConfig.from_pretrained(out)
    assert (ends.bos_token_id, ends.eos_token_id) == (ours.bos_id, ours.eos_id)
    capsys.readouterr()
    texts = []
    for folder in (tmp_path / "run", out):
        assert lct(["generate", str(folder), "--tokens", "5", "--prompt", "import os", "--temperature", "0"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_the_tokenizer_that_the_run_used_is_exported(tmp_path: Path) -> None:
    """The folder that the run started from has another one."""
    source = chat_folder(saved(tmp_path / "hf", LLAMA), CHATML)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8], "temperature": 0.5}))
    path = default_tokenizer_path()
    out = run_and_export(tmp_path, f"--model.path={source}", f"--model.tokenizer_path={path}")
    assert AutoTokenizer.from_pretrained(out).encode(TEXTS[0])[1:] == open_tokenizer(path).encode(TEXTS[0])
    ids = {"bos_token_id": 4096, "eos_token_id": 4097}
    assert json.loads((out / "generation_config.json").read_text()) == ids
    assert ids.items() <= json.loads((out / "config.json").read_text()).items()
    shutil.rmtree(out)
    shutil.rmtree(tmp_path / "run")
    out = run_and_export(tmp_path, f"--model.path={source}")
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    settings = json.loads((out / "generation_config.json").read_text())
    assert {7, 8} < {*settings["eos_token_id"]}
    assert settings["temperature"] == 0.5
