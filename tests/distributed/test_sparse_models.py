"""Laws of training with sparse attention: layouts change nothing, indexers learn what attention reads, and warm up."""

import tempfile
from unittest import mock

import pytest
import torch

from lct_planner.tracing import trace
from longshard.context.execution import sparse_rows
from longshard.context.execution.sparse_rows import Index
from longshard.context.sparse_attention import SparseSettings, sparse_attention
from tests.distributed.attention_cases import relative
from tests.distributed.harness import FAMILY_FLAVORS, assert_parity, run_layout, trainer_of, whole
from tests.distributed.memory_cases import job_of
from tests.distributed.pool import WorkerPool
from tests.distributed.test_activation_checkpoint import MODES, counted_case
from tests.distributed.test_parity import degrees, reference
from tests.slow import slow
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.families.decoder_args import sizes
from trainer.job import resolve
from trainer.job.language import _attention
from trainer.job.sparse_attention import trains_indexers_alone
from trainer.models.auxiliary_loss import normalise_auxiliary_losses
from trainer.runtime.process_group import Process

pytestmark = pytest.mark.about("trainer/models/sparse_attention.py")

MODEL = ["--model.name=deepseek_v32", "--training.attention_mask=document", "--training.dtype=float64"]
COMPILED = ["--compile.enable", "--compile.backend=inductor"]
OTHERS = ["--optimizer.groups", "{parameters = '*', lr_factor = 0.0}"]
WARM_UP = [OTHERS[0], "{parameters = '*.indexer.*', lr_factor = 1.0}", OTHERS[1]]


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (4, [*degrees(cp=2, tp=2), *MODES["op"]]),
        *slow(
            (2, [*degrees(cp=2), *MODES["full"], "--parallelism.context_parallel_load_balancer=balanced"]),
            (2, [*degrees(cp=2), *COMPILED, *MODES["op"]]),
            (4, [*degrees(cp=2, tp=2), *COMPILED]),
            (3, [*degrees(cp=3)]),
            (8, [*degrees(dp_shard=2, cp=2, tp=2)]),
        ),
    ],
)
def test_a_layout_equals_one_process(pool: WorkerPool, ranks: int, arguments: list[str]) -> None:
    """Losses, weights, and all gradients, also the gradients of indexers."""
    got = pool.run(ranks, run_layout, [*MODEL, *arguments])[0]
    wanted = reference(pool, *MODEL)
    indexers = [gradient for name, gradient in wanted.gradients[0].items() if ".indexer." in name]
    assert min(gradient.norm() for gradient in indexers) > 0
    assert_parity(got, wanted, 1e-10)


def test_recomputation_by_operator_runs_the_operator_once(pool: WorkerPool) -> None:
    layers = FAMILY_FLAVORS["deepseek_v32"]["tiny"].n_layers
    for mode, times in (("op", 1), ("full", 2)):
        counts, *_ = pool.run(1, counted_case, [*MODEL, *MODES[mode]])[0]
        assert counts["longshard::sparse_attention"] == times * layers
        assert counts["longshard::sparse_attention_backward"] == layers


def shares(index: Index, inputs: list[torch.Tensor], per_query: int) -> torch.Tensor:
    """Return the mean share of full attention that the chosen keys of a query have."""
    q, latent, up = inputs
    chosen = sparse_attention(q, latent, up, index, None, SparseSettings(1.0, per_query)).chosen
    queries = torch.cat((q[..., :4] @ up[:, :4], q[..., 4:]), -1)
    rows = latent.shape[1]
    later = torch.ones(rows, rows, dtype=torch.bool).triu(1)
    weights = (queries @ latent.unsqueeze(1).mT).masked_fill(later, -torch.inf).softmax(-1).mean(1)
    spare = chosen.long().masked_fill(chosen < 0, rows)
    return torch.nn.functional.pad(weights, (0, 1)).gather(-1, spare).sum(-1).mean()


@pytest.mark.parametrize("stages", [(0,), (8,), (0, 8)])
def test_an_indexer_learns_which_keys_attention_reads(stages: tuple[int, ...]) -> None:
    """By the dense warm-up (0 keys), the sparse stage, and one after the other. At first it chooses by chance."""
    torch.manual_seed(0)
    features = torch.randn(2, 64, 12)
    make = [torch.randn(12, width) / 12**0.5 for width in (2 * 6, 6)]
    q = (features @ make[0]).unflatten(-1, (2, 6)).transpose(1, 2) * 2
    inputs = [q, features @ make[1], torch.randn(2, 4 + 3, 4)]
    weights = [torch.nn.Parameter(torch.randn(12, width) / 12**0.5) for width in (4 * 8, 8, 4)]
    optimizer = torch.optim.Adam(weights, lr=0.02)

    def index() -> Index:
        queries, keys, heads = (features @ weight for weight in weights)
        return Index(queries.unflatten(-1, (4, 8)), keys, heads)

    start = shares(index(), inputs, 8)
    losses = []
    for per_query in stages:
        for _ in range(150):
            result = sparse_attention(*inputs, index(), None, SparseSettings(1.0, per_query, learns=True))
            losses.append(result.loss.mean())
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
    assert shares(index(), inputs, 8) > start + 0.15


def test_the_warm_up_trains_indexers_alone_and_reads_all_keys(pool: WorkerPool) -> None:
    arguments = [*MODEL, *WARM_UP]
    warm = pool.run(2, run_layout, [*arguments, *degrees(cp=2)])[0]
    assert_parity(warm, pool.run(1, run_layout, arguments)[0], 1e-10)
    before = pool.run(1, run_layout, [*MODEL, "--training.steps=1", "--optimizer.lr=1e-30"])[0].weights
    moved = {
        name for name, weight in warm.weights.items() if not torch.allclose(weight, before[name], rtol=0, atol=1e-9)
    }
    assert moved == {name for name in before if ".indexer." in name}
    sparse = reference(pool, *MODEL)
    assert warm.metrics[0]["loss"] != sparse.metrics[0]["loss"]


def test_only_the_groups_of_the_warm_up_make_attention_dense() -> None:
    model = FAMILY_FLAVORS["deepseek_v32"]["tiny"]
    one = [OTHERS[0], "{parameters = 'layers.0.*.wo.weight', lr_factor = 0.0}"]
    some = [*WARM_UP[:1], "{parameters = '*.indexer.keys.*', lr_factor = 1.0}", *WARM_UP[2:]]
    for groups, wanted in ((WARM_UP, True), (OTHERS, False), ([], False), (one, False), (some, False)):
        config = parse_command_line([*MODEL, *groups]).config
        assert trains_indexers_alone(config, model) == wanted
        assert not trains_indexers_alone(config, FAMILY_FLAVORS["deepseek_v3"]["tiny"])


def padding_case() -> float:
    """Relative difference of the indexers' gradients of 12 tokens, alone and before 5 rows of padding."""
    gradients = []
    with trainer_of(["--model.name=deepseek_v32", "--training.dtype=float64"]) as trainer:
        (part,) = trainer.model_parts
        normalise_auxiliary_losses(part, torch.ones(()))
        for padding in (0, 5):
            tokens = torch.arange(12 + padding).unsqueeze(0) * 7 % 50
            positions = torch.arange(12 + padding).unsqueeze(0)
            positions[:, 12:] = -1
            part.zero_grad()
            part(tokens, positions=positions)[:, :12].square().sum().backward()
            named = part.named_parameters()
            gradients.append(torch.cat([whole(p.grad).flatten() for name, p in named if ".indexer." in name]))
    return relative(gradients[1], gradients[0])


def test_padding_teaches_an_indexer_nothing(pool: WorkerPool) -> None:
    assert pool.run(1, padding_case)[0] < 1e-10


@pytest.mark.parametrize(
    ("key", "value"),
    [("method", "all_to_all"), ("kernel", "math"), ("heads_per_pass", "1")],
)
def test_settings_of_planned_attention_are_refused(key: str, value: str) -> None:
    arguments = ["--model.name=deepseek_v32", "--model.flavor=debugmodel", *degrees(cp=2)]
    arguments.append("--parallelism.context_parallel_method=all_gather")
    config = parse_command_line([*arguments, f"--parallelism.context_parallel_{key}={value}"]).config
    with pytest.raises(ConfigError, match=f"context_parallel_{key} = .* is not for a model whose queries choose"):
        resolve(config, 2, "cpu")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "causal, in plain PyTorch: one rank has the whole sequence"),
        (WARM_UP, "causal, all keys that a query sees: optimizer.groups trains indexers alone, in plain PyTorch"),
        (["--training.attention_mask=document"], "kernel plain PyTorch (the only one for chosen keys)"),
    ],
)
def test_the_summary_says_what_attention_is(arguments: list[str], words: str) -> None:
    model = ["--model.name=deepseek_v32", "--model.flavor=debugmodel"]
    job = resolve(parse_command_line([*model, *arguments]).config, 1, "cpu")
    assert words in _attention(job)


def planned_case(seq_len: int) -> tuple[float, float]:
    """FLOPs of the forward and of the backward of one layer on the first of two ranks, as the planner traces them."""
    arguments = ["--model.name=deepseek_v32", "--model.flavor=debugmodel", f"--training.seq_len={seq_len}"]
    arguments += ["--training.local_batch_size=1", "--training.global_batch_size=-1", *degrees(cp=2)]
    tiles = {"KEYS": 64, "TILE_BYTES": 0}
    with tempfile.TemporaryDirectory() as folder, mock.patch.multiple(sparse_rows, **tiles):
        job = job_of(arguments, folder, Process(rank=0, local_rank=0, world_size=2))
        events = trace(job, 0, None)
    names = "sparse_attention", "sparse_attention_backward"
    forward, backward = (sum(e.flops for e in events.all if e.place == name) for name in names)
    return forward / job.model.n_layers, backward / job.model.n_layers


def test_the_planner_counts_scores_of_visible_keys_and_attention_to_chosen_ones(pool: WorkerPool) -> None:
    """By the products of the definition. Tiles of 16 queries and 64 keys hold some pairs that are not visible."""
    seq_len = 1024
    model = sizes("deepseek_v32")["debugmodel"]
    index, latent = model.index, model.latent
    ((forward, backward),) = pool.run(1, planned_case, seq_len)
    rows = seq_len / 2
    scores = rows * (seq_len / 2) * 2 * index.n_heads * (index.head_dim + 1)
    products = model.n_heads * (2 * latent.rank + latent.rope_dim)
    chosen = rows * index.per_query * 2
    learned = chosen * index.n_heads * (index.head_dim + 1)
    absorbed = rows * 2 * model.n_heads * latent.rank * (latent.nope_dim + latent.value_dim)
    assert forward == pytest.approx(scores + chosen * products + learned + absorbed, rel=0.15)
    # the backward computes the forward's products of chosen keys again, and two more for each of them
    assert backward == pytest.approx(3 * (chosen * products + learned + absorbed), rel=0.15)
