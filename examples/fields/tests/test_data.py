"""Laws of fields: a file reads as it was written, each rank its part; one order for all degrees; resuming; refusals."""

import json
import shutil
import sys
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

import numpy as np
import pytest
import torch

if sys.version_info < (3, 11):
    pytest.skip("fields need Python 3.11", allow_module_level=True)

import zarr
from zarr.storage import LocalStore, WrapperStore

from examples.fields.file import FieldSource, write_fields
from examples.fields.loader import FieldLoader, persistence_error
from trainer.config.errors import ConfigError, MissingFile

SHAPE = (5, 9, 2, 40, 70)  # two pieces of rows, three of columns, three of times
FRAMES = np.random.default_rng(0).normal(3, 2, SHAPE).astype(np.float32)
MEAN, STD = FRAMES.mean((0, 1, 3, 4), dtype=np.float64), FRAMES.std((0, 1, 3, 4), dtype=np.float64)
NORMAL = (FRAMES - MEAN.astype(np.float32)[:, None, None]) / STD.astype(np.float32)[:, None, None]
ATTRIBUTES = {"channels": ["a", "b"], "seed": 0}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("fields") / "folder" / "fields.zarr"
    write_fields(file, FRAMES, SHAPE, ATTRIBUTES)
    return file


@pytest.fixture
def source(path: Path) -> FieldSource:
    return FieldSource.open(path)


def loader(source: FieldSource, *, b=1, n=4, r=0, d=1, seed=0, lead=1, held_out=2, part=None) -> FieldLoader:
    return FieldLoader(
        source,
        local_batch_size=b,
        data_streams=n,
        seed=seed,
        dp_rank=r,
        dp_degree=d,
        lead=lead,
        held_out=held_out,
        part=part,
    )


def numbers(batches) -> list[tuple[int, int]]:
    return [tuple(pair) for batch in batches for pair in batch["sample_numbers"].tolist()]


def cells(part) -> np.ndarray:
    """The normalised frames of a part whose axes are lists of ranges."""
    rows, columns = ([i for start, stop in axis for i in range(start, stop)] for axis in part)
    return NORMAL[:, :, :, rows][..., columns]


# --- the file


def test_what_is_written_is_read(source: FieldSource) -> None:
    assert (source.trajectories, source.times, source.channels, source.grid) == (5, 9, ("a", "b"), (40, 70))
    np.testing.assert_allclose(source.mean[:, 0, 0], MEAN, rtol=1e-6)
    np.testing.assert_allclose(source.std[:, 0, 0], STD, rtol=1e-6)
    for trajectory, times in product((0, 4), (slice(None), slice(3, 4), slice(1, 8, 6))):
        np.testing.assert_allclose(source.read(trajectory, times), NORMAL[trajectory, times], atol=1e-6)


PARTS = [
    (((0, 40),), ((0, 70),)),
    (((0, 13),), ((32, 64),)),
    (((39, 40),), ((69, 70),)),
    (((0, 5), (30, 40)), ((7, 8), (31, 33), (60, 70))),
    ((), ((3, 9),)),
    (((0, 40),), ()),
]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_read(source: FieldSource, part) -> None:
    got = source.read(1, slice(2, 5, 2), part)
    expected = cells(part)[1, 2:5:2]
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_one_range_may_stand_for_a_list_of_one(source: FieldSource) -> None:
    assert (source.read(0, slice(1), ((0, 5), (3, 3))).shape) == (1, 2, 5, 0)
    both = [source.read(0, slice(2), part) for part in (((1, 5), (3, 9)), (((1, 5),), ((3, 9),)))]
    assert (both[0] == both[1]).all()
    with pytest.raises(ValueError, match="must lie within the 40 rows or columns"):
        source.read(0, slice(1), ((0, 41), (0, 70)))


class Counting(WrapperStore):
    """A store that remembers the chunks that were read, and their bytes."""

    def __init__(self, store) -> None:
        super().__init__(store)
        self.chunks: dict[str, int] = {}

    async def get(self, key, prototype, byte_range=None):
        value = await super().get(key, prototype, byte_range)
        if "/c/" in f"/{key}":
            self.chunks[key] = len(value)
        return value


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("lead", [1, 5])
def test_only_the_chunks_of_the_part_are_read(source: FieldSource, path: Path, part, lead) -> None:
    store = Counting(LocalStore(path / "fields", read_only=True))
    counted = replace(source, array=zarr.open_array(store, mode="r"))
    rows, columns = ({i // 32 for start, stop in axis for i in range(start, stop)} for axis in part)
    for trajectory, t in islice(product(range(5), range(SHAPE[1] - lead)), 6):
        store.chunks.clear()
        counted.read(trajectory, slice(t, t + lead + 1, lead), part)
        times = {t // 4, (t + lead) // 4}
        expected = {f"c/{trajectory}/{a}/0/{b}/{c}" for a, b, c in product(times, rows, columns)}
        assert store.chunks.keys() == expected
        assert all(size == 4 * 2 * 32 * 32 * 4 for size in store.chunks.values())


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    def interrupted():
        yield FRAMES[0]
        assert list(tmp_path.iterdir())  # it is being written
        assert not (tmp_path / "fields.zarr").exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_fields(tmp_path / "fields.zarr", interrupted(), SHAPE, ATTRIBUTES)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten_also_not_what_came_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "fields.zarr"

    def late():
        yield from FRAMES
        path.write_text("mine")

    for trajectories in (late(), FRAMES):
        with pytest.raises(ConfigError, match=r"fields\.zarr exists already, and nothing is overwritten"):
            write_fields(path, trajectories, SHAPE, ATTRIBUTES)
        assert [file.name for file in tmp_path.iterdir()] == ["fields.zarr"]
        assert path.read_text() == "mine"


# --- batches


def test_a_batch_has_the_part_of_frames_and_those_after_the_lead(source: FieldSource) -> None:
    part = PARTS[3]
    for batch in islice(loader(source, b=3, lead=2, part=part), 4):
        assert {name: x.dtype for name, x in batch.items()} == {
            "inputs": torch.float32,
            "targets": torch.float32,
            "sample_numbers": torch.int64,
        }
        assert batch["inputs"].shape == batch["targets"].shape == (3, 2, 15, 13)
        for i, (trajectory, t) in enumerate(numbers([batch])):
            np.testing.assert_allclose(batch["inputs"][i], cells(part)[trajectory, t], atol=1e-6)
            np.testing.assert_allclose(batch["targets"][i], cells(part)[trajectory, t + 2], atol=1e-6)


@pytest.mark.parametrize(("rows", "columns"), [((20, 40), (35, 70)), ((7, 7, 40), (70,)), ((40,), (1, 70))])
def test_the_parts_of_ranks_assemble_to_the_whole(source: FieldSource, rows, columns) -> None:
    """Ranks with other parts, one of them empty, read the same samples."""
    whole = next(iter(loader(source, b=2)))
    assembled = []
    for start, stop in zip((0, *rows), rows, strict=False):
        ranges = zip((0, *columns), columns, strict=False)
        batches = [next(iter(loader(source, b=2, part=((start, stop), columns)))) for columns in ranges]
        assert all(torch.equal(batch["sample_numbers"], whole["sample_numbers"]) for batch in batches)
        assembled.append({name: torch.cat([b[name] for b in batches], 3) for name in ("inputs", "targets")})
    for name in ("inputs", "targets"):
        assert torch.equal(torch.cat([row[name] for row in assembled], 2), whole[name])


def test_an_epoch_has_every_training_sample_once_and_the_next_in_another_order(source: FieldSource) -> None:
    one = loader(source)
    got = numbers(islice(one, 48))
    assert sorted(got[:24]) == sorted(got[24:]) == list(product(range(3), range(8)))
    assert got[:24] != got[24:]
    assert got[:24] != sorted(got[:24])
    assert one.epoch == 2
    assert got[:24] != numbers(islice(loader(source, seed=1), 24))


@pytest.mark.parametrize(("d", "b"), [(1, 3), (2, 1), (2, 3), (4, 2)])
def test_the_order_does_not_depend_on_the_degree_or_the_batch_size(source: FieldSource, d: int, b: int) -> None:
    expected = numbers(islice(loader(source), 5 * d * b))
    per_rank = [numbers(islice(loader(source, b=b, r=r, d=d), 5)) for r in range(d)]
    assert [pair for group in zip(*per_rank, strict=True) for pair in group] == expected


def test_held_out_samples_come_in_order_and_leave_the_position(source: FieldSource) -> None:
    one = loader(source, b=3, lead=2, part=PARTS[1])
    before = one.state_dict()
    batches = list(one.evaluation_samples())
    assert numbers(batches) == list(product((3, 4), range(7)))
    assert [len(batch["inputs"]) for batch in batches] == [3, 3, 3, 3, 2]
    np.testing.assert_allclose(batches[-1]["targets"][-1], cells(PARTS[1])[4, 8], atol=1e-6)
    assert one.state_dict() == before
    assert list(loader(source, held_out=0).evaluation_samples()) == []


def test_the_error_of_persistence(source: FieldSource) -> None:
    expected = np.mean((NORMAL[3:, 2:].astype(np.float64) - NORMAL[3:, :-2]) ** 2)
    assert persistence_error(source, lead=2, held_out=2) == pytest.approx(expected, rel=1e-6)
    batches = loader(source, b=5, lead=2).evaluation_samples()
    errors = [(batch["targets"] - batch["inputs"]).double().square().mean((1, 2, 3)) for batch in batches]
    assert torch.cat(errors).mean().item() == pytest.approx(expected, rel=1e-6)


# --- resume


def merged(loaders) -> dict:
    written = json.dumps({s: entry for one in loaders for s, entry in one.state_dict().items()})
    return {int(s): entry for s, entry in json.loads(written).items()}


@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 4, 2), (4, 2, 1), (3, 2, 6)])
def test_resume_in_an_epoch_on_another_degree_is_exact(source: FieldSource, degrees) -> None:
    """Each leg has 3 batches on another number of ranks, and resumes from the leg before, over the end of an epoch."""
    everything = numbers(islice(loader(source), 6 * sum(degrees)))
    states, done = None, 0
    for d in degrees:
        ranks = [loader(source, b=2, r=r, d=d) for r in range(d)]
        for r, one in enumerate(ranks):
            if states is not None:
                one.load_state_dict(states)
            window = range(done, done + 6 * d)
            assert numbers(islice(one, 3)) == [everything[i] for i in window if i % d == r]
        states, done = merged(ranks), done + 6 * d
    reached = loader(source)
    numbers(islice(reached, done))
    assert states == reached.state_dict()


def test_a_resumed_batch_has_the_frames_of_the_uninterrupted_run(source: FieldSource) -> None:
    first = loader(source, b=2)
    list(islice(first, 3))
    second = loader(source, b=2)
    second.load_state_dict(merged([first]))
    for a, b in zip(islice(first, 5), second, strict=False):
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_states_of_other_data_are_refused(source: FieldSource) -> None:
    states = merged([loader(source)])
    entry = {"epoch": 0, "item": 0, "samples": 0, "data_streams": 4, "seed": 0, "trajectories": 3, "times": 9}
    content = states[0]["content"]
    identity = {"content": content, "numbers": source.numbers}
    assert states == dict.fromkeys(range(4), entry | {"lead": 1} | identity)
    others = replace(source, mean=source.mean + 1)
    with pytest.raises(ConfigError, match="the content of the data set has changed since the checkpoint"):
        loader(others).load_state_dict(states)
    for other, message in (
        (loader(source, lead=2), "lead = 2 is not the 1 of the saved data state"),
        (loader(source, seed=1), "training.seed = 1 is not the 0"),
        (loader(source, n=2), "training.data_streams = 2 is not the 4"),
        (loader(source, held_out=1), "trajectories = 4 is not the 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            other.load_state_dict(states)
    documents = {s: {"epoch": 0, "document": 0, "data_streams": 4, "documents": 30, "seed": 0} for s in range(4)}
    with pytest.raises(ConfigError, match=r"the saved position in the data belongs to another training\.dataset"):
        loader(source).load_state_dict(documents)
    del states[3]
    with pytest.raises(ConfigError, match="lacks stream 3"):
        loader(source).load_state_dict(states)


@pytest.mark.parametrize("hashed", [1 << 24, 100])
def test_trajectories_in_another_order_and_other_numbers_are_refused(
    tmp_path: Path, source: FieldSource, monkeypatch: pytest.MonkeyPatch, hashed: int
) -> None:
    monkeypatch.setattr("examples.fields.file.HASHED", hashed)
    states = merged([loader(source)])
    loader(source).load_state_dict(states)
    for name, frames in {"order": FRAMES[::-1], "numbers": FRAMES[:, :, :, ::-1]}.items():
        write_fields(tmp_path / name, frames, SHAPE, ATTRIBUTES)
        other = replace(FieldSource.open(tmp_path / name), mean=source.mean, std=source.std)
        with pytest.raises(ConfigError, match="the numbers of the fields, or their order, have changed"):
            loader(other).load_state_dict(states)
    older = {stream: {key: x for key, x in state.items() if key != "numbers"} for stream, state in states.items()}
    loader(source).load_state_dict(older)


def test_the_hash_of_a_large_array_reads_little(monkeypatch: pytest.MonkeyPatch, source: FieldSource) -> None:
    monkeypatch.setattr("examples.fields.file.HASHED", 100)
    monkeypatch.setattr("examples.fields.file.PIECES", 3)
    read = []

    class Large:
        shape = (10**6, 10**6, 2, 10**4, 10**4)

        def __getitem__(self, index: tuple) -> np.ndarray:
            read.append(index)
            return np.zeros((1, 2, 32, 32), np.float32)

    assert replace(source, array=Large()).numbers
    middle = slice(4984, 5016)
    assert read == [(n, slice(0, 1), slice(None), middle, middle) for n in (0, 499_999, 999_999)]


# --- refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lead": 9}, "fields.lead = 9 must be at least 1 and below the 9 frames of a trajectory"),
        ({"lead": 0}, "fields.lead = 0 must be at least 1"),
        ({"held_out": 5}, "fields.held_out = 5 must be at least 0 and leave one of the 5"),
        ({"n": 25}, "training.data_streams = 25 needs as many samples and .* has 24; leave it out, or use at most 24"),
    ],
)
def test_settings_that_do_not_fit_are_refused(source: FieldSource, settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        loader(source, **settings)


def test_persistence_without_held_out_trajectories_is_refused(source: FieldSource) -> None:
    with pytest.raises(ConfigError, match=r"no trajectory of .* is held out"):
        persistence_error(source, lead=1, held_out=0)


def changed(group, **attributes) -> None:
    group.attrs.update(attributes)


def without_array(group) -> None:
    del group["fields"]


def other_array(shape, dtype) -> object:
    return lambda group: group.create_array("fields", shape=shape, dtype=dtype, overwrite=True)


BAD_FILES = {
    "not zarr": (lambda group: Path(group.store.root, "zarr.json").unlink(), "no zarr group"),
    "cut short": (lambda group: Path(group.store.root, "zarr.json").write_text('{"zarr'), "no zarr group"),
    "newer": (lambda group: changed(group, format_version=2), "of format version 2, and this program reads version 1"),
    "foreign": (lambda group: group.attrs.clear(), "without a format version"),
    "no array": (without_array, "'fields' must have 5 dimensions"),
    "shape": (other_array((5, 9, 40, 70), "float32"), r"has \(5, 9, 40, 70\) in float32"),
    "dtype": (other_array(SHAPE, "float64"), "in float64"),
    "empty": (other_array((0, 9, 2, 40, 70), "float32"), "must have 5 dimensions"),
    "channels": (lambda group: changed(group, channels=["a"]), "a name, a finite mean and a finite, positive"),
    "std": (lambda group: changed(group, std=[1.0, 0.0]), "positive standard deviation of its 2 channels"),
    "mean": (lambda group: changed(group, mean="high"), "a finite mean"),
    "infinite": (lambda group: changed(group, mean=[np.inf] * 2, std=[np.inf] * 2), "a finite, positive standard"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_that_is_no_file_of_fields_is_refused_in_one_sentence(path: Path, tmp_path: Path, case: str) -> None:
    spoil, message = BAD_FILES[case]
    copy = tmp_path / "copy.zarr"
    shutil.copytree(path, copy)
    spoil(zarr.open_group(copy))
    with pytest.raises(ConfigError, match=message) as error:
        FieldSource.open(copy)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("; make one with `python -m examples.fields.make_fields`")


def test_a_missing_file_is_refused_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match=r"nothing\.zarr does not exist; make it with `python -m examples"):
        FieldSource.open(tmp_path / "nothing.zarr")


def test_a_missing_or_damaged_chunk_is_an_error_and_never_zeros(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.zarr"
    shutil.copytree(path, copy)
    chunk = copy / "fields" / "c" / "1" / "0" / "0" / "0" / "0"
    chunk.write_bytes(chunk.read_bytes()[:1000])
    source = FieldSource.open(copy)
    with pytest.raises(ConfigError, match=r"trajectory 1 of .* cannot be read"):
        source.read(1, slice(2))
    chunk.unlink()
    with pytest.raises(ConfigError, match=r"trajectory 1 of .* lacks a chunk"):
        source.read(1, slice(2))
    source.read(1, slice(2), ((32, 40), (0, 70)))
    source.read(1, slice(4, 9))
