"""Laws of the other formats: the same promises as tiktoken's, and the ids of the libraries that wrote the files."""

import json
from pathlib import Path

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as FastTokenizer

from trainer.config.errors import ConfigError
from trainer.data.sources.registry import DataSettings, all_documents
from trainer.data.tokenizers.tiktoken_format import TiktokenTokenizer
from trainer.data.tokenizers.tokenizer import Tokenizer, default_tokenizer_path, open_tokenizer, vocab_size_of
from trainer.data.tokenizers.tokenizer_json import JsonTokenizer

UNICODE = st.text(st.characters(exclude_categories=["Cs"]))
SPECIALS = ("<|begin|>", "<|end|>", "<|turn|>")


def texts() -> list[str]:
    real = list(all_documents(DataSettings("python_stdlib")))[::60]
    return [*real, "naïve Ünïcode 中文 \U0001f600 1234567", "  \t\n x"]


def write_json(folder: Path, *, config: dict | None, begins: bool = True) -> Path:
    """Write a byte-level BPE like Llama 3's and Qwen's, with special tokens after the vocabulary.

    begins: a template adds the begin token.
    """
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(
        texts(), trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    fast.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    begin = fast.token_to_id("<|begin|>")
    if begins:
        fast.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", begin)])
    else:
        fast.post_processor = processors.ByteLevel(trim_offsets=False)
    folder.mkdir(exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


OLDER = {"__type": "AddedToken", "content": "<|end|>", "lstrip": False, "normalized": False, "rstrip": False}
CONFIG = {"bos_token": "<|begin|>", "eos_token": OLDER, "tokenizer_class": "PreTrainedTokenizerFast"}


@pytest.fixture(scope="module")
def json_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_json(tmp_path_factory.mktemp("json"), config=CONFIG)


@pytest.fixture(scope="module")
def tokenizer(json_folder: Path) -> Tokenizer:
    return open_tokenizer(str(json_folder))


@settings(deadline=None)
@given(UNICODE)
def test_decoding_gives_back_any_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(UNICODE, st.booleans(), st.booleans())
def test_begin_and_end_stand_around_the_same_tokens(tokenizer: Tokenizer, text: str, bos: bool, eos: bool) -> None:
    expected = [tokenizer.bos_id] * bos + tokenizer.encode(text) + [tokenizer.eos_id] * eos
    assert tokenizer.encode(text, bos=bos, eos=eos) == expected
    assert all(0 <= i < tokenizer.vocab_size for i in expected)


def test_a_lone_surrogate_becomes_the_replacement_character(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


@given(st.lists(st.sampled_from([*SPECIALS, "<s>", "</s>", "a", " ", "<|"])))
def test_special_tokens_in_text_are_ordinary_text(tokenizer: Tokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    ids = tokenizer.encode(text)
    assert not {tokenizer.bos_id, tokenizer.eos_id} & {*ids}
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_decoded_by_name(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a b", bos=True, eos=True)) == "<|begin|>a b<|end|>"


def test_the_ids_are_those_of_transformers(json_folder: Path) -> None:
    ours, theirs = open_tokenizer(str(json_folder)), transformers.AutoTokenizer.from_pretrained(str(json_folder))
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs) == vocab_size_of(str(json_folder))
    for text in texts():
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)


def test_a_folder_is_known_by_its_files(tmp_path: Path, json_folder: Path) -> None:
    """The first of tokenizer.json, which is the model's own, original/tokenizer.model and tokenizer.model."""
    ranks = Path(default_tokenizer_path()).read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(ranks)
    assert isinstance(open_tokenizer(str(tmp_path)), TiktokenTokenizer)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15")
    with pytest.raises(
        ConfigError, match=r"is a model of sentencepiece, which is not read; name the tokenizer\.json of"
    ):
        vocab_size_of(str(tmp_path))
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "tokenizer.model").write_bytes(ranks)
    assert isinstance(open_tokenizer(str(tmp_path)), TiktokenTokenizer)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((json_folder / name).read_bytes())
    assert isinstance(open_tokenizer(str(tmp_path)), JsonTokenizer)
    assert isinstance(open_tokenizer(str(tmp_path / "tokenizer.json")), JsonTokenizer), "a file by its content"


@pytest.mark.parametrize(
    ("config", "others", "ends", "begins"),
    [
        (CONFIG, {}, ("<|begin|>", "<|end|>"), True),
        (CONFIG, {}, (None, "<|end|>"), False),  # as SmolLM2's: a begin token is named, and nothing puts it there
        ({"bos_token": None, "eos_token": "<|end|>"}, {"bos_token_id": 3}, (None, "<|end|>"), False),  # as Qwen's
        ({**CONFIG, "add_bos_token": False}, {}, ("<|begin|>", "<|end|>"), True),
        ({**CONFIG, "add_bos_token": True}, {}, (None, "<|end|>"), False),
        (None, {"bos_token_id": 1, "eos_token_id": [601, 602]}, ("<|begin|>", "<|end|>"), True),
        (None, {"bos_token_id": 1, "eos_token_id": [601, 602]}, (None, "<|end|>"), False),  # Llama's default is a word
        ({"eos_token": "<|turn|>"}, {"bos_token_id": 600}, ("<|begin|>", "<|turn|>"), True),
    ],
)
def test_what_begins_and_ends_a_text(
    tmp_path: Path, config: dict | None, others: dict, ends: tuple, begins: bool
) -> None:
    folder = write_json(tmp_path / "it", config=config, begins=begins)
    (folder / "generation_config.json").write_text(json.dumps(others))
    tokenizer = open_tokenizer(str(folder))
    decoded = [None if i is None else tokenizer.decode([i]) for i in (tokenizer.bos_id, tokenizer.eos_id)]
    assert tuple(decoded) == ends
    if ends[0] is None:
        assert tokenizer.encode("a", bos=True) == tokenizer.encode("a"), "a token that there is not is left out"
    if config is not None:
        theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
        assert tokenizer.encode("a fox", bos=True) == theirs("a fox")["input_ids"], "with transformers' own begin"


def test_several_tokens_before_a_text_are_refused(tmp_path: Path) -> None:
    folder = write_json(tmp_path / "it", config=CONFIG)
    content = (folder / "tokenizer.json").read_text()
    piece = '{"SpecialToken":{"id":"<|begin|>","type_id":0}}'
    squeezed = json.dumps(json.loads(content), separators=(",", ":"))
    assert piece in squeezed
    (folder / "tokenizer.json").write_text(squeezed.replace(piece, f"{piece},{piece}", 1))
    with pytest.raises(ConfigError, match="begins a text with 2 tokens, and only one is supported"):
        open_tokenizer(str(folder))


def broken(folder: Path, name: str, content: str | bytes) -> str:
    """Return the error for a folder with one broken file."""
    file = folder / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError) as error:
        open_tokenizer(str(folder))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "content",
    [
        '{"model": {}}',
        "{",
        '{"model": {"vocab": {"a": "b"}}}',
        '{"model": {"vocab": {"a": 0}}}',
        '{"model": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"model": {"vocab": {"a": 0}}, "added_tokens": ["b"]}',
    ],
)
def test_a_damaged_json_is_one_sentence(tmp_path: Path, content: str) -> None:
    message = broken(write_json(tmp_path, config=CONFIG), "tokenizer.json", content)
    assert "is no tokenizer.json of Hugging Face's tokenizers" in message


def test_a_json_without_an_end_of_text_is_one_sentence(tmp_path: Path) -> None:
    folder = write_json(tmp_path, config={"bos_token": "<|begin|>"})
    with pytest.raises(ConfigError, match="names a token that ends a text; copy tokenizer_config"):
        open_tokenizer(str(folder))
    assert "is no JSON" in broken(folder, "tokenizer_config.json", "{")


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"eos_token_id": 99999}, "eos_token_id = 99999 next to tokenizer.json is no id of its"),
        ({"eos_token_id": [-1, 601]}, "eos_token_id = -1 next to"),
        ({"eos_token_id": "601"}, "eos_token_id = '601' next to"),
        ({"eos_token_id": True}, "eos_token_id = True next to"),
    ],
)
def test_an_end_that_is_no_id_is_one_sentence(tmp_path: Path, others: dict, message: str) -> None:
    """No embedding has a row for it."""
    folder = write_json(tmp_path, config=None)
    assert message in broken(folder, "generation_config.json", json.dumps(others))


@pytest.mark.parametrize("token", [5, ["<|end|>"], {"content": 5}])
def test_a_name_that_is_no_text_names_nothing(tmp_path: Path, token: object) -> None:
    folder = write_json(tmp_path, config=CONFIG)
    message = broken(folder, "tokenizer_config.json", json.dumps({"eos_token": token}))
    assert "names a token that ends a text" in message


def test_a_normalizer_of_the_file_is_used(tmp_path: Path) -> None:
    folder = write_json(tmp_path, config=CONFIG)
    fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    fast.normalizer = normalizers.NFC()
    fast.save(str(folder / "tokenizer.json"))
    tokenizer = open_tokenizer(str(folder))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")
