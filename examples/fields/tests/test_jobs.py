"""Law: a job on fields is decided, checked and told from its configuration; sizes of models are what their code has."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples.fields.nat_args import NATArgs
from examples.fields.points_args import PointsArgs
from examples.fields.spec import FieldArgs
from examples.fields.tests.drifting import write_drifting_fields, write_drifting_points
from examples.fields.unet_args import UNetArgs
from longshard.domain.domain import Domain
from longshard.domain.tensor import DomainTensor
from tests.slow import slow
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.families.registry import MODELS
from trainer.job import ResolvedJob, resolve
from trainer.job.summary import summary
from trainer.models.model_spec import model_spec

IMPORTS = ["--job.imports=examples.fields"]
FOLDER = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_drifting_fields(tmp_path_factory.mktemp("fields") / "fields.zarr")


def job_of(path: str, *arguments: str, ranks: int = 1) -> ResolvedJob:
    settings = [
        "--job.imports=examples.fields",
        "--model.name=unet",
        "--training.dataset=fields",
        f"--training.dataset_path={path}",
    ]
    settings += ["--training.data_streams=4"]
    return resolve(parse_command_line([*settings, *arguments]).config, ranks, "cpu")


SHAPES = [
    ("unet", UNetArgs(widths=(8, 16, 24), blocks=2, groups=4).for_fields(3, 16, 24)),
    ("unet", UNetArgs(widths=(16, 32), blocks=1, groups=8).for_fields(3, 16, 24)),
    ("nat", NATArgs(dim=32, n_layers=3, n_heads=4, kernel=3, dilation=2, hidden_dim=48).for_fields(3, 16, 24)),
    ("points", PointsArgs(dim=16, n_layers=2, neighbors=4, slices=3).for_fields(6, 20, 1)),
]


@pytest.mark.parametrize(("name", "args"), SHAPES)
def test_the_number_of_parameters_is_that_of_the_model(name: str, args: FieldArgs) -> None:
    with torch.device("meta"):
        model = model_spec(name).build(args)
    assert sum(p.numel() for p in model.parameters()) == args.n_params()


@pytest.mark.parametrize("name", ["unet", "nat", "points"])
def test_flavors_can_be_built(name: str) -> None:
    for args in MODELS[name].flavors.values():
        args = args.for_fields(*args.assumed_shape)
        with torch.device("meta"):
            model = model_spec(name).build(args)
        assert sum(p.numel() for p in model.parameters()) == args.n_params()


@pytest.mark.parametrize(("name", "args"), SHAPES)
def test_models_are_single_device_code(name: str, args: FieldArgs) -> None:
    """Plain tensors, and domain tensors of one rank, give the same."""
    x = torch.randn(2, args.channels, args.height, args.width, dtype=torch.float64)
    model = model_spec(name).build(args).double()
    whole = model.output(model(x))
    assert whole.shape == x.shape
    assert torch.equal(model.output(model(DomainTensor(x, Domain({})))).local, whole)


def test_memory_of_a_rank_falls_with_the_ranks_of_the_domain(path: str) -> None:
    one, four = job_of(path), job_of(path, "--parallelism.domain_parallel_degrees=4", ranks=4)
    assert four.task.memory(four).tables == pytest.approx(one.task.memory(one).tables / 4)
    assert four.task.memory(four).weights == pytest.approx(one.task.memory(one).weights / 4, rel=1e-4)
    uneven = job_of(path, "--parallelism.domain_parallel_degrees=2", "--fields.rows=12,4", ranks=2)
    assert uneven.task.memory(uneven).tables == pytest.approx(one.task.memory(one).tables * 12 / 16)


def test_the_summary_says_how_fields_are_divided(path: str) -> None:
    degrees = ["--parallelism.domain_parallel_degrees", "2", "2", "--fields.rows", "9,7", "12,0"]
    text = " ".join(summary(job_of(path, *degrees, ranks=8)).split())
    assert "divided over the domain: height 16 as 9, 7; width 12 as 12, 0" in text
    assert "dp_shard 2 x domain_0 2 x domain_1 2 = 8 CPU ranks; dp_shard x domain = 8 ranks shard parameters" in text
    assert "3 channels on 16 x 12 points" in text
    assert "3,072 points: 16 fields of 192" in text


REFUSED = {
    "rows that do not add up": (
        ["--parallelism.domain_parallel_degrees=2", "--fields.rows=9,8"],
        "fields.rows: '9,8' must be 2 numbers whose sum is the height 16, such as '8,8'",
    ),
    "rows of too many axes": (
        ["--parallelism.domain_parallel_degrees=2", "--fields.rows", "9,7", "6,6"],
        "must have an entry for each of parallelism.domain_parallel_degrees = [2]",
    ),
    "rows without degrees": (["--fields.rows=9,7"], "without parallelism.domain_parallel_degrees"),
    "three axes": (
        ["--parallelism.domain_parallel_degrees", "2", "1", "1"],
        "'unet' divides height and width; give at most 2",
    ),
    "a degree of zero": (["--parallelism.domain_parallel_degrees=0"], "must be degrees of at least 1"),
    "context parallelism": (["--parallelism.context_parallel_degree=2"], "use parallelism.domain_parallel_degrees"),
    "both": (
        ["--parallelism.context_parallel_degree=2", "--parallelism.domain_parallel_degrees=2"],
        "parallelism.context_parallel_degree = 2 divides sequences of tokens; use",
    ),
    "a pipeline": (["--parallelism.pipeline_parallel_degree=2"], "divides language models"),
    "tensor parallelism of convolutions": (["--parallelism.tensor_parallel_degree=2"], "has convolutions"),
    "float8": (["--float8.enable"], "is for language models"),
    "points of a grid": (["--model.name=points"], "fields of 16 x 12 with 3 channels are no points"),
    "a language model": (
        ["--model.name=llama3"],
        "'llama3' is a model of text, and training.dataset = 'fields' is fields; use model.name = 'unet' or 'nat', or",
    ),
    "text": (["--training.dataset=python_stdlib", "--training.dataset_path=None"], "is a model of fields"),
    "no path": (["--training.dataset_path="], "needs training.dataset_path"),
    "a missing file": (
        ["--training.dataset_path=/nowhere.zarr"],
        "does not exist; make it with `python -m examples",
    ),
    "a lead that is too long": (["--fields.lead=10"], "must be at least 1 and below the 10 frames"),
    "no trajectory to train on": (["--fields.held_out=6"], "fields.held_out = 6 must be at least 0"),
    "more streams than samples": (["--training.data_streams=1000"], "needs as many samples"),
}


# Keys about tokens, with a setting that is not their default.
WITHOUT_TOKENS = {
    "model.norm_type": "layernorm",
    "validation.enable": "true",
    "lora.rank": "4",
    "model.tokenizer_path": "some/folder",
    "model.mtp_layers": "1",
    "optimizer.qk_clip": "100",
    "model.rope_theta": "1e6",
    "model.sliding_window": "64",
    "model.attention_sinks": "",
    "model.short_conv_kernel": "4",
    "model.rope_scaling": "8",
    "model.rope_scaling_type": "yarn",
    "model.rope_original_seq_len": "64",
    "training.seq_len": "64",
    "training.z_loss": "0.1",
    "training.on_bad_record": "skip",
    "activation_checkpoint.offload": "inputs",
    "activation_checkpoint.mlp_chunk_tokens": "8",
    "training.attention_mask": "document",
    "training.balance": "step",
    "training.packing": "pad",
    "mixture.names": "web",
    "training.loss_chunk_tokens": "64",
    "training.sequence_chunks": "2",
}


@pytest.mark.parametrize("key", WITHOUT_TOKENS)
def test_keys_about_tokens_have_no_effect_on_fields(path: str, key: str) -> None:
    value = WITHOUT_TOKENS[key]
    (note,) = job_of(path, f"--{key}={value}" if value else f"--{key}").notes
    assert note.startswith(f"{key} = ")
    assert note.endswith("has no effect with training.dataset = 'fields', which has no tokens")


@pytest.mark.parametrize("key", ["lead=3", "held_out=1"])
def test_keys_about_fields_have_no_effect_on_tokens(path: str, key: str) -> None:
    (note,) = resolve(parse_command_line([*IMPORTS, f"--fields.{key}"]).config, 1, "cpu").notes
    assert note.endswith("has no effect without training.dataset = 'fields'")
    assert job_of(path, f"--fields.{key}").notes == ()


@pytest.mark.parametrize("preset", ["unet", "nat"])
@pytest.mark.parametrize("degrees", [[], *slow(["2"], ["2", "2"])])
def test_presets_work_without_notes(preset: str, degrees: list[str], tmp_path: Path) -> None:
    path = write_drifting_fields(tmp_path / "fields.zarr", height=32, width=32, trajectories=16)
    arguments = ["--job.config_file", str(FOLDER / f"{preset}.toml"), f"--training.dataset_path={path}"]
    arguments += ["--parallelism.domain_parallel_degrees", *degrees] if degrees else []
    command = parse_command_line(arguments)
    assert command.notes == ()
    assert resolve(command.config, 2 ** len(degrees), "cpu").notes == ()


REFUSED_POINTS = {
    "two axes": (["--parallelism.domain_parallel_degrees", "2", "1"], "'points' divides points; give at most 1"),
    "compiled": (["--compile.enable"], "depends on where its points are, which is no graph; leave it out"),
    "a large neighbourhood": (["--model.flavor=base"], "12 points are fewer than the 16 neighbours"),
    "a grid": (["--model.name=unet"], "fields of 12 x 1 cannot be halved"),
}


@pytest.mark.parametrize("case", REFUSED_POINTS)
def test_what_is_refused_of_points(case: str, tmp_path: Path) -> None:
    path = write_drifting_points(
        tmp_path / "points.zarr", points=12 if case in ("a grid", "a large neighbourhood") else 32
    )
    arguments, message = REFUSED_POINTS[case]
    with pytest.raises(ConfigError) as refused:
        job_of(path, "--model.name=points", *arguments, ranks=2)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_preset_of_points_works_without_notes(tmp_path: Path) -> None:
    path = write_drifting_points(tmp_path / "points.zarr", trajectories=16)
    arguments = ["--job.config_file", str(FOLDER / "points.toml"), f"--training.dataset_path={path}"]
    command = parse_command_line([*arguments, "--parallelism.domain_parallel_degrees=2"])
    assert command.notes == resolve(command.config, 2, "cpu").notes == ()


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(path: str, case: str) -> None:
    arguments, message = REFUSED[case]
    with pytest.raises(ConfigError) as refused:
        job_of(path, *arguments, ranks=2)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_domain_degrees_are_refused_for_tokens() -> None:
    config = parse_command_line(["--parallelism.domain_parallel_degrees=2"]).config
    with pytest.raises(ConfigError, match=r"use parallelism\.context_parallel_degree"):
        resolve(config, 2, "cpu")


def test_a_wrong_product_names_the_domain(path: str) -> None:
    with pytest.raises(ConfigError, match=r"domain_parallel_degrees \(product\) = 4, .* world size of 6"):
        job_of(path, "--parallelism.domain_parallel_degrees", "2", "2", ranks=6)


def test_a_grid_that_cannot_be_halved_is_refused(tmp_path: Path) -> None:
    odd = write_drifting_fields(tmp_path / "odd.zarr", height=18)
    with pytest.raises(ConfigError, match=r"fields of 18 x 12 cannot be halved 2 times .* multiples of 4"):
        job_of(odd)


def test_fields_that_are_elsewhere_have_an_assumed_shape() -> None:
    config = parse_command_line(
        [*IMPORTS, "--model.name=unet", "--training.dataset=fields", "--training.dataset_path=/elsewhere.zarr"]
    ).config
    missing: list[str] = []
    job = resolve(config, 2, "cuda", missing=missing)
    assert (job.model.height, job.model.width) == (256, 256)
    assert len({*missing}) == 1


def test_a_field_model_is_described_in_checkpoints_without_its_grid() -> None:
    from trainer.stores.state import model_description

    args = UNetArgs(widths=(8, 16)).for_fields(3, 16, 24)
    config = parse_command_line([*IMPORTS, "--model.name=unet"]).config
    assert model_description(config, args) == model_description(config, replace(args, height=64))
    assert model_description(config, args)["widths"] == [8, 16]
