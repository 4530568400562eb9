"""Laws of prompts and answers as plain text: their tokens, their labels, and names of special tokens in them."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat_files import TEMPLATES, chat_folder
from tests.unit.chat_encoding import TURNS, learnt, read, sampled
from trainer.data.packing import IGNORE_INDEX
from trainer.data.tokenizers.conversation_encoder import ConversationEncoder
from trainer.data.tokenizers.template_files import find_template
from trainer.data.tokenizers.tokenizer import default_tokenizer_path, open_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("chat")
    return {name: chat_folder(root / name, text, file=name == "chatml") for name, text in TEMPLATES.items()}


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(TEXT, TEXT.filter(str.strip))
def test_plain_text_is_begin_prompt_answer_end(prompt, answer):
    tokenizer = open_tokenizer()
    sample = sampled(ConversationEncoder(tokenizer, None), (read({"prompt": prompt, "completion": answer})))
    assert sample.tokens.tolist() == tokenizer.encode(prompt + answer, bos=True, eos=True)
    first = int(np.argmax(sample.labels != IGNORE_INDEX))
    assert (sample.labels[first:-1] == sample.tokens[first + 1 :]).all()
    # Tokens before the first label have all bytes of the prompt, and the last of them has one.
    before = [len(token) for token in tokenizer._encoding.decode_tokens_bytes(sample.tokens[1 : first + 1].tolist())]
    assert sum(before) >= len(prompt.encode())
    assert not before or sum(before[:-1]) < len(prompt.encode())


@pytest.mark.parametrize("name", ["tiktoken", "json"])
def test_a_token_across_the_border_has_no_label(name, folders):
    """` the` is one token: with the blank in the prompt, it is a part of the prompt."""
    tokenizer = open_tokenizer(default_tokenizer_path() if name == "tiktoken" else str(folders["llama3"]))
    assert len(tokenizer.encode(" the")) == 1
    ours = ConversationEncoder(tokenizer, None)
    for prompt, answer, wanted in (("and ", "the fox", " fox"), ("and", " the fox", " the fox")):
        sample = sampled(ours, (read({"prompt": prompt, "answer": answer})))
        assert learnt(sample, tokenizer) == wanted + tokenizer.decode([tokenizer.eos_id])


def test_names_of_special_tokens_are_text_in_plain_text_and_tokens_in_rendered_text(folders):
    json_folder = str(folders["llama3"])
    for tokenizer, name in ((open_tokenizer(), "<|eot_id|>"), (open_tokenizer(json_folder), "<|end|>")):
        text = f"naïve 漢字 😀{name} x"
        ids, places = tokenizer.encode_with_places(text, special=False)
        assert ids.tolist() == tokenizer.encode(text)
        special, places = tokenizer.encode_with_places(text, special=True)
        assert len(special) < len(ids)
        (at,) = [i for i, (a, b) in enumerate(places.tolist()) if text[a:b] == name]
        assert tokenizer.decode([special[at]]) == name
        assert tokenizer.decode(special.tolist()) == text
        assert (places[1:, 0] >= places[:-1, 0]).all()
        assert places[0, 0] == 0
        assert places[-1, 1] == len(text)


def test_llama_3_in_both_formats(tmp_path):
    """A file of ranks comes without settings, so the format defines begin and end."""
    (tmp_path / "t.jinja").write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}")
    tokenizer = open_tokenizer()
    ends = {"bos_token": "<|begin_of_text|>"}
    template = find_template(default_tokenizer_path(), str(tmp_path / "t.jinja"), ends=ends)
    sample = sampled(ConversationEncoder(tokenizer, template), (read({"messages": TURNS[:2]})))
    assert tokenizer.decode(sample.tokens.tolist()) == "<|begin_of_text|>two and three?<|eot_id|>five<|eot_id|>"
    assert learnt(sample, tokenizer) == "five<|eot_id|>"
