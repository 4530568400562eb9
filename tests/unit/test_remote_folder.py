"""Laws of checkpoint folders in a remote store, by the names in it: a step is whole or unfinished, never half read."""

import builtins
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.s3_server import ADDRESS, reached_by, s3_server
from tests.unit.test_checkpoint_folder import refused, shape_of
from trainer.commands.main import main as lct
from trainer.config.errors import ConfigError, MissingFile
from trainer.config.loader import parse_command_line
from trainer.config.schema import JobConfig
from trainer.job import resolve
from trainer.stores.addresses import store_of
from trainer.stores.folder import read_state, step_to_load
from trainer.stores.kept import best_saved, keep_latest, mark_best
from trainer.stores.remote_store import SAVING_FILE, RemoteStore
from trainer.stores.state import RunState, model_description, state_text
from trainer.stores.store import Place

pytestmark = pytest.mark.about("trainer/stores/file_part.py")

STREAM = {"epoch": 0, "document": 3, "token": 17, "samples": 5, "seed": 0, "data_streams": 64, "documents": 700}


@pytest.fixture(scope="module")
def store() -> Iterator[None]:
    with s3_server() as variables, reached_by(variables):
        yield


@pytest.fixture
def folder(store: None, request: pytest.FixtureRequest) -> RemoteStore:
    """A folder of checkpoints that has nothing in it."""
    return store_of("checkpoint.folder", f"{ADDRESS}/{abs(hash(request.node.name))}")


def configured(folder: object, *arguments: str) -> JobConfig:
    return parse_command_line(["--checkpoint.enable", f"--checkpoint.folder={folder}", *arguments]).config


def save(folder: RemoteStore, step: int, *, done: str = "all") -> None:
    """Write the objects of a checkpoint. done: `data` or `state` ends the save after these objects, as if killed."""
    place, claim = folder.step(step), folder.begin(step)
    contents = {".metadata": b"m" * 10, "__0_0.distcp": bytes(100 + step), "__1_0.distcp": bytes(50)}
    for name, content in contents.items():
        folder.write(place / name, content)
    if done == "data":
        return
    files = {name: len(content) for name, content in contents.items()}
    model = model_description(JobConfig(), shape_of(JobConfig()))
    state = RunState(step, 1000 * step, model, dict.fromkeys(range(64), STREAM), files)
    if done == "state":  # killed before `saving` is removed
        with mock.patch.object(type(place), "unlink", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            folder.publish(step, state_text(state), claim)
        return
    folder.publish(step, state_text(state), claim)


def test_what_is_published_is_read_back_and_found_by_a_run(folder: RemoteStore) -> None:
    folder.prepare()
    assert folder.objects() == {}
    for step in (500, 1500, 1000):
        save(folder, step)
    state = read_state(folder, 1000)
    assert (state.step, state.tokens_seen, state.files["__0_0.distcp"]) == (1000, 1_000_000, 1100)
    assert folder.steps() == [500, 1000, 1500]
    assert step_to_load(configured(folder)) == 1500
    assert step_to_load(configured(folder, "--checkpoint.load_step=500")) == 500
    assert not any("saving" in name or name.endswith(".tmp") for name in folder.objects())
    resolve(configured(folder), 1)
    assert "use one of the saved steps: 500, 1000, 1500" in refused(configured(folder, "--checkpoint.load_step=7"))


def test_what_is_saved_by_another_process_is_seen_at_once(folder: RemoteStore) -> None:
    assert folder.steps() == []
    type(folder.path.fs).clear_instance_cache()
    other = store_of("checkpoint.folder", str(folder))
    assert other.path.fs is not folder.path.fs
    save(other, 500)
    assert folder.steps() == [500]


@pytest.mark.parametrize("address", [f"{ADDRESS}/slashes/", "s3://whole", "s3://whole/"])
def test_an_address_may_end_with_a_slash_and_may_be_a_whole_bucket(store: None, address: str) -> None:
    folder = store_of("checkpoint.folder", address)
    folder.path.fs.makedirs("whole", exist_ok=True)
    save(folder, 500)
    assert folder.steps() == [500]
    keep_latest(folder, 1, 500)
    read_state(folder, 500)
    folder.begin(500)
    assert folder.objects().keys() == {"step-500/saving"}


@pytest.mark.parametrize("done", ["data", "state"])
def test_an_interrupted_save_is_whole_or_removed(folder: RemoteStore, done: str) -> None:
    save(folder, 500)
    save(folder, 1000, done=done)
    whole = [500, 1000] if done == "state" else [500]
    assert folder.steps() == whole
    folder.prepare()
    assert folder.steps() == whole
    names = {name for name in folder.objects() if name.startswith("step-1000/")}
    assert names == (
        {f"step-1000/{n}" for n in ("state.json", ".metadata", "__0_0.distcp", "__1_0.distcp")}
        if done == "state"
        else set()
    )


@pytest.mark.parametrize("calls", [0, 1, 2, 3])
def test_a_removal_that_is_killed_at_any_request_leaves_no_half_of_a_checkpoint(
    folder: RemoteStore, calls: int
) -> None:
    """The checkpoint is still whole, or it is no checkpoint and the next run removes the remaining objects."""
    for step in (500, 1000):
        save(folder, step)
    left = iter(range(calls))

    def until_then(function):
        def call(*args, **kwargs):
            if next(left, None) is None:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        return call

    kind = RemoteStore
    with (
        mock.patch.object(kind, "write", until_then(kind.write)),
        mock.patch.object(folder.path.fs, "rm", until_then(folder.path.fs.rm)),
        pytest.raises(KeyboardInterrupt),
    ):
        keep_latest(folder, 1, 1000)
    assert folder.steps() == ([500, 1000] if calls < 2 else [1000])
    for step in folder.steps():
        read_state(folder, step)
    folder.prepare()
    assert folder.steps() == ([500, 1000] if calls < 2 else [1000])
    assert not any("saving" in name for name in folder.objects())
    keep_latest(folder, 1, 1000)
    assert {name.split("/")[0] for name in folder.objects()} == {"step-1000"}


@pytest.mark.parametrize("other", ["begins", "is done", "starts"])
def test_of_two_jobs_that_save_to_one_name_the_last_that_began_is_published(folder: RemoteStore, other: str) -> None:
    """The first job gets an error, and its objects never count as the other job's objects."""
    theirs = store_of("checkpoint.folder", str(folder))
    claim = folder.begin(500)
    folder.write(folder.step(500) / f"{claim}0_0.distcp", b"of the first")
    state = RunState(500, 0, {}, {}, {f"{claim}0_0.distcp": 12})
    if other == "starts":
        theirs.remove_unfinished()
    else:
        last = theirs.begin(500)
        assert last != claim
    if other == "is done":
        save(theirs, 500)
    with pytest.raises(OSError, match="another job saves there, too"):
        folder.publish(500, state_text(state), claim)
    assert folder.steps() == ([500] if other == "is done" else [])
    save(theirs, 500)
    assert read_state(folder, 500).files["__0_0.distcp"] == 600


def test_the_best_and_the_latest_stay(folder: RemoteStore) -> None:
    for step in (1, 2, 3, 4, 5):
        save(folder, step)
        mark_best(folder, step, 0.5 if step == 2 else None)
        keep_latest(folder, 2, step, every=3)
    assert folder.steps() == [2, 3, 4, 5]
    assert best_saved(folder) == (2, 0.5)
    save(folder, 2)  # of another history
    mark_best(folder, 2, None)
    assert best_saved(folder) is None


def test_a_step_of_another_history_is_replaced(folder: RemoteStore) -> None:
    save(folder, 500)
    (folder.path / "step-500" / "__2_0.distcp").write_bytes(b"of a third rank")
    (folder.path / "step-500" / "notes.txt").write_bytes(b"of a person")
    folder.begin(500)
    assert folder.steps() == []
    assert folder.sizes(500).keys() == {"saving", "notes.txt"}


def test_what_others_have_put_there_stays_and_a_step_of_theirs_is_refused(folder: RemoteStore) -> None:
    for name in ("step-7.old/x", "best", "step-007/x", "my-step-9/x"):
        (folder.path / name).write_bytes(b"of a person")
    before = folder.objects()
    folder.prepare()
    keep_latest(folder, 1, 10)
    assert folder.objects() == before
    (folder.path / "step-12" / ".metadata").write_bytes(b"of another program")
    with pytest.raises(ConfigError, match="step-12 in it is no checkpoint of this program"):
        folder.prepare()
    assert folder.steps() == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("__0_0.distcp", b"short", "__0_0.distcp has 5 bytes of 600"),
        ("__1_0.distcp", None, "'__1_0.distcp' is missing"),
        ("state.json", b"{", "Expecting property name"),
    ],
)
def test_a_damaged_step_is_one_sentence(folder: RemoteStore, name: str, content: bytes | None, message: str) -> None:
    save(folder, 500)
    save(folder, 400)
    place = folder.path / "step-500" / name
    place.unlink() if content is None else place.write_bytes(content)
    text = refused(configured(folder))
    assert f"{folder}/step-500 cannot be read ({message}" in text
    assert "use another with checkpoint.load_step (there are 400)" in text


def fails_after(folder: RemoteStore, size: int) -> None:
    with folder.open(folder.path / "part", "wb") as stream:
        stream.blocksize = 5 * 2**20
        stream.write(bytes(size))
        raise KeyError


def test_an_object_of_a_failed_write_never_appears(folder: RemoteStore) -> None:
    """The garbage collector does not finish the write, and no uploaded part is left."""
    for size in (1000, 12 * 2**20):  # in one request, and in parts
        with pytest.raises(KeyError):
            fails_after(folder, size)
        assert folder.objects() == {}
        assert folder.path.fs.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads") is None
    with folder.open(folder.path / "part", "wb") as stream:
        stream.write(bytes(1000))
    assert folder.objects() == {"part": 1000}


def test_a_store_that_does_not_answer_is_one_sentence(folder: RemoteStore, capsys: pytest.CaptureFixture[str]) -> None:
    with reached_by({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}):
        with pytest.raises(MissingFile, match=r"cannot be read \(Could not connect to the endpoint"):
            step_to_load(configured(folder))
        away = store_of("checkpoint.folder", str(folder))
        with pytest.raises(OSError, match="Could not connect"):
            away.prepare()
        with pytest.raises(OSError, match="Could not connect"):  # and no checkpoint is taken for none
            best_saved(away)
        assert lct(["verify", str(folder)]) == 2
        assert "cannot be read (Could not connect to the endpoint" in capsys.readouterr().err
        missing: list[str] = []
        resolve(configured(folder), 1, missing=missing)  # a plan is made without the store
        assert len(missing) == 1


def test_a_bucket_that_does_not_exist_is_named(store: None) -> None:
    assert "bucket does not exist); check address, credentials and network" in refused(configured("s3://buckte/run"))
    start = parse_command_line(["--checkpoint.initial_load_path=s3://buckte/run/step-5"]).config
    assert "step-5 cannot be read (" in refused(start)
    start = parse_command_line([f"--checkpoint.initial_load_path={ADDRESS}/nobody/step-5"]).config
    assert "is no folder here, and no checkpoint in a store" in refused(start)


def test_addresses_that_cannot_be_opened(tmp_path: Path) -> None:
    for address in ("s3://", "s3:///", "s3:///run"):
        assert f"= {address!r} names no bucket; name one, such as s3://bucket/run" in refused(configured(address))
    assert "= 'memory://run' is lost when the process ends; name a folder" in refused(configured("memory://run"))
    assert "is no address (Unsupported filesystem: 'nope')" in refused(configured("nope://a/b"))
    real = builtins.__import__

    def without(name: str, *args, **kwargs):
        if name == "upath":
            raise ImportError("No module named 'upath'")
        return real(name, *args, **kwargs)

    with mock.patch("builtins.__import__", without):
        text = refused(configured(ADDRESS))
    assert "pip install universal_pathlib and the package of its store: s3fs for s3://" in text
    assert "only checkpoints may be in a remote store" in refused(
        configured(ADDRESS, "--job.dump_folder=s3://bucket/run")
    )
    assert "use lct convert to-hf after the run" in refused(configured(ADDRESS, "--checkpoint.last_save_in_hf"))


def test_saving_is_written_first_and_removed_last(folder: RemoteStore) -> None:
    """The leftovers of a killed process always show that they belong to this program."""
    seen = []
    write, remove = RemoteStore.write, folder.path.fs.rm

    def noted(store: RemoteStore, file: Place, content: bytes) -> None:
        seen.append(file.name)
        write(store, file, content)

    def removed(names: list[str] | str, **options) -> None:
        seen.append("objects" if isinstance(names, list) else Path(names).name)
        assert f"{folder.path.path}/step-500/{SAVING_FILE}" in folder.path.fs.find(folder.path.path)
        remove(names, **options)

    with mock.patch.object(RemoteStore, "write", noted):
        save(folder, 500)
        with mock.patch.object(folder.path.fs, "rm", removed):
            save(folder, 500)
    assert seen == [
        *("saving", ".metadata", "__0_0.distcp", "__1_0.distcp", "state.json"),
        *("saving", "state.json", "objects", "saving"),  # the older one is removed
        *("saving", ".metadata", "__0_0.distcp", "__1_0.distcp", "state.json", "saving"),
    ]
