"""Laws of mixtures: each source has its share, the order is one for all degrees, and a resume is exact."""

import json
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loading import batch_loader
from tests.numbered import mixed
from tests.packing import assert_exact_in_legs
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.config.schema import Model, Training
from trainer.data.job_data import open_text
from trainer.data.loader import BatchLoader
from trainer.data.mixture import Mixture, ends_of, positions_of, source_of_sample
from trainer.data.sources.registry import DataSettings
from trainer.data.tokenizers.tokenizer import default_tokenizer_path
from trainer.job import resolve
from trainer.job.summary import summary

pytestmark = pytest.mark.about("trainer/job/data.py")

KEYS = ("tokens", "labels", "positions", "document_ids")
WEIGHTS = (0.6, 0.1, 0.3)


def loader(weights=WEIGHTS, *, names: str = "abc", r: int = 0, d: int = 1, n: int | None = 4):
    """A mixture of sources whose tokens begin with 1, 2, 3 millions."""
    shape = {"seq_len": 20, "local_batch_size": 1, "data_streams": n, "seed": 0, "dp_rank": r, "dp_degree": d}
    return batch_loader(mixed(names, weights), **shape)


def rows(batches) -> list[tuple]:
    """Each sample with the number of its source, which its tokens must be of."""
    samples = []
    for batch in batches:
        for i, source in enumerate(batch["sources"].tolist()):
            assert set((batch["tokens"][i] // 10**6).tolist()) == {source + 1}
            samples.append((source, *(tuple(batch[key][i].tolist()) for key in KEYS)))
    return samples


@pytest.mark.parametrize(
    "weights", [(0.5, 0.5), (0.9, 0.1), (1, 2, 3), (0.25,) * 4, (0.01, 0.99), (0.137, 0.056, 0.063, 0.236, 0.508)]
)
def test_each_source_has_its_share_at_any_time_in_the_whole_and_in_each_stream(weights: tuple[float, ...]) -> None:
    ends, number, n = ends_of(weights), 100_000, 64
    sources = np.array([source_of_sample(sample, ends) for sample in range(number)])
    for source, weight in enumerate(weights):
        share = weight / sum(weights)
        surplus = np.cumsum(sources == source) - share * np.arange(1, number + 1)
        assert abs(surplus).max() < 5
        for stream in range(n):
            is_source = sources[stream::n] == source
            assert abs(is_source.sum() - share * len(is_source)) < 5


@pytest.mark.parametrize("n", [1, 4])
def test_sample_i_of_the_run_is_of_source_i_of_the_sequence(n: int) -> None:
    """As docs/data.md gives it, whatever the number of streams: sample i is number i // n of stream i % n."""
    golden = (5**0.5 - 1) / 2
    ends = np.cumsum(WEIGHTS)
    wanted = [int(np.searchsorted(ends, (i * golden) % 1, side="right")) for i in range(300)]
    assert [source for source, *_ in rows(islice(iter(loader(n=n)), 300))] == wanted


def test_a_weight_of_zero_is_no_sample() -> None:
    for weights in ((0, 1, 0, 1, 0), (0, 1), (1, 0)):
        counts = Counter(source_of_sample(sample, ends_of(weights)) for sample in range(10_000))
        assert set(counts) == {source for source, weight in enumerate(weights) if weight}


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(0, 9)), min_size=1, max_size=4))
def test_the_order_does_not_depend_on_degrees_and_a_resume_is_exact(legs: list[tuple[int, int]]) -> None:
    states = assert_exact_in_legs(loader, rows, legs)
    assert all(type(value) is int for entry in states.values() for value in entry.values())


def test_weights_may_change_at_a_resume_and_each_source_continues_where_it_was() -> None:
    first = loader()
    before = rows(islice(iter(first), 60))
    second = loader((0, 1, 1))
    second.load_state_dict(first.state_dict())
    after = rows(islice(iter(second), 60))
    assert Counter(source for source, *_ in after)[0] == 0
    whole = loader((0, 1, 0))  # all of source 1, in the order of each stream
    wanted = rows(islice(iter(whole), 400))
    read_rows = [row for row in before + after if row[0] == 1]
    for stream in range(4):
        expected = [row for i, row in enumerate(wanted) if i % 4 == stream]
        stream_rows = [row for row in read_rows if row in expected]
        assert stream_rows == expected[: len(stream_rows)]
        assert len(stream_rows) > 5


def test_an_epoch_of_a_source_has_each_document_once_whatever_the_others_do() -> None:
    tokens = [token for source, ids, *_ in rows(islice(iter(loader(n=1)), 900)) if source == 1 for token in ids]
    size = len(set(tokens))
    assert len(tokens) > 2 * size
    assert len(set(tokens[:size])) == len(set(tokens[size : 2 * size])) == size


def test_positions_count_samples_and_passes_of_each_source() -> None:
    one = loader()
    seen = Counter(source for source, *_ in rows(islice(iter(one), 100)))
    positions = positions_of(one.state_dict(), "abc")
    assert [samples for samples, _ in positions] == [seen[0], seen[1], seen[2]]
    parts = [stream.parts.values() for stream in one._streams.values()]
    wanted = [sum(part.passes for part in source_parts) for source_parts in zip(*parts, strict=True)]
    assert [passes for _, passes in positions] == pytest.approx(wanted, abs=0.3)


def test_the_smallest_source_decides_how_many_streams_there_are() -> None:
    assert len(loader(n=None).state_dict()) == 2  # 16 documents of c


def test_other_sources_and_changed_sources_are_refused() -> None:
    states = loader().state_dict()
    with pytest.raises(ConfigError, match=r"mixture.names = \['a', 'b'\] are not the sources of the checkpoint, .*'c'"):
        loader((1, 1), names="ab").load_state_dict(states)
    changed = {s: entry | {"b/content": 1} for s, entry in states.items()}
    with pytest.raises(ConfigError, match="of the source 'b', the content of the data set has changed"):
        loader().load_state_dict(changed)
    fewer = {s: entry | {"b/documents": 99} for s, entry in states.items()}
    with pytest.raises(ConfigError, match="has 24 documents, and had 99"):
        loader().load_state_dict(fewer)


def test_what_makes_tokens_of_the_data_is_recognised(tmp_path):
    """Another tokenizer of the same size, another field, another length of pieces, in a mixture too."""
    shipped = Path(default_tokenizer_path()).read_text().splitlines()
    words = [line.split() for line in shipped]
    words[-1][0], words[-2][0] = words[-2][0], words[-1][0]
    (other := tmp_path / "other.tiktoken").write_text("".join(f"{token} {rank}\n" for token, rank in words))
    (file := tmp_path / "a.jsonl").write_text('{"text": "one two", "body": "four five"}\n' * 20)

    def opened(tokenizer=None, seq_len=16, mixture=False, **training) -> BatchLoader:
        how = DataSettings.of("jsonl", str(file), Model(tokenizer_path=tokenizer), Training(**training))
        data = open_text(how, training.get("packing"))
        data = Mixture({"web": data, "code": data}, (1, 1)) if mixture else data
        settings = {"local_batch_size": 1, "data_streams": 4, "seed": 0, "dp_rank": 0, "dp_degree": 1}
        return batch_loader(data, seq_len=seq_len, **settings)

    def told_by(call, states) -> str:
        with pytest.raises(ConfigError) as error:
            call(states)
        return str(error.value)

    for mixture in (False, True):
        source = "of the source 'web', " if mixture else ""
        one = partial(opened, mixture=mixture)
        states = one().state_dict()
        one(seq_len=32).load_state_dict(states)
        message = told_by(one(str(other)).load_state_dict, states)
        assert message.startswith(
            f"{source}the tokenizer (model.tokenizer_path) is not the tokenizer of the checkpoint"
        )
        message = told_by(one(dataset_text_field="body").load_state_dict, states)
        assert message.startswith(f"{source}training.dataset_text_field is another one than in the checkpoint, so that")
        for packing, other_packing in (("best_fit", "pad"), ("pad", "best_fit")):
            states = one(packing=packing).state_dict()
            one(packing=other_packing).load_state_dict(states)
            message = told_by(one(packing=packing, seq_len=32).load_state_dict, states)
            assert message.startswith(
                f"{source}training.seq_len = 32 is not the 16 of the checkpoint, and its training.pac"
            )


# --- settings


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name in ("web", "code"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": f"{name} {i}"}) for i in range(20)))
    return tmp_path


def arguments(data: Path, **changes: str) -> list[str]:
    chosen = {"names": "web code", "paths": f"{data}/web.jsonl {data}/code.jsonl", "weights": "3 1"} | changes
    words = [[f"--mixture.{key}", *words.split()] for key, words in chosen.items() if words]
    return ["--training.dataset=jsonl", *(word for option in words for word in option)]


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        resolve(parse_command_line(words).config, 1)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_mixture_is_said(data: Path) -> None:
    job = resolve(parse_command_line(arguments(data)).config, 1)
    assert "jsonl: web 75.0%, code 25.0%" in summary(job)


@pytest.mark.parametrize(
    ("changes", "options", "part"),
    [
        ({"weights": "1"}, (), "mixture.weights = [1.0] lists 1, and mixture.names = ['web', 'code'] lists 2"),
        ({"weights": ""}, (), "mixture.weights = [] lists 0"),
        ({"weights": "1 -2"}, (), "mixture.weights = [1.0, -2.0] must be at least 0, and one above 0; write shares"),
        ({"weights": "0 0"}, (), "must be at least 0, and one above 0"),
        (
            {"weights": "1 x"},
            (),
            "mixture.weights = [1.0, 'x'] (on the command line) must be a list, each item a finite",
        ),
        ({"names": "web web"}, (), "'web' must be a name of letters, digits, '_', '-' and '.', of one source"),
        ({"names": "web a/b"}, (), "'a/b' must be a name of letters"),
        ({"names": "", "weights": ""}, (), "has no effect without mixture.names; name the sources, or leave it out"),
        ({"names": "", "paths": ""}, (), "mixture.weights = [3.0, 1.0] has no effect without mixture.names"),
        ({"paths": "a.jsonl b.jsonl"}, (), "mixture.paths = 'a.jsonl' is neither a file nor a folder"),
        ({}, ("--training.dataset_path=x",), "'x' would do nothing with mixture.paths; leave it out"),
        ({}, ("--training.dataset=python_stdlib",), "'python_stdlib' is no kind of data that mixture.paths can name"),
    ],
)
def test_a_wrong_mixture_is_refused(data: Path, changes: dict[str, str], options: tuple[str, ...], part: str) -> None:
    words = arguments(data, **changes)
    assert part in refusal(*(words[1:] if "dataset=" in str(options) else words), *options)
