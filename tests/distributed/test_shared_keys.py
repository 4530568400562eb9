"""Law: layers that share keys and values, and embeddings of each layer (Gemma 4), compute what transformers computes.

Whole and packed texts, on every layout, and written token by token.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from lct_inference.generation import Writing, generate
from longshard import context_parallel
from longshard.context.live import own_positions
from longshard.context.planning.mask import documents
from tests.distributed.harness import assert_parity, run_layout
from tests.distributed.pool import WorkerPool
from tests.distributed.test_experts import ep
from tests.distributed.test_families import A2A, LAYOUTS
from tests.distributed.test_generation import GREEDY, PROMPTS, opened
from tests.distributed.test_parity import degrees, reference
from tests.hf_families import MODELS, hf_decoder, in_double
from tests.slow import slow
from trainer.checkpoint.weights import load_weights
from trainer.config.schema import Model
from trainer.families.layer_kinds import key_sources
from trainer.hugging_face.folder import HFFolder
from trainer.hugging_face.reader import HFReader
from trainer.job import ResolvedJob
from trainer.models import block, decoder
from trainer.models.model_spec import hf_model, model_spec
from trainer.parallel.parallel_dims import ParallelDims

pytestmark = pytest.mark.about("trainer/models/attention.py", "trainer/models/decoder.py")

DENSE, SHARED = "gemma4", "gemma4-shared"
LENGTHS = 7, 1, 12, 5
"""Of packed documents: 25 tokens, which neither two nor three ranks divide."""


@contextmanager
def loaded(folder: str, cp: int) -> Iterator[tuple[nn.Module, ResolvedJob, ParallelDims]]:
    """A model with the weights of a folder, on `cp` context-parallel ranks."""
    with opened(Model(name="gemma4", flavor=folder), cp=cp) as (part, job, dims):
        load_weights([HFReader(HFFolder(Path(folder)), hf_model(model_spec("gemma4"), job.model))], [part])
        yield part, job, dims


def written_case(folder: str, cp: int) -> list[list[int]]:
    with loaded(folder, cp) as (part, job, dims):
        return generate(part, job, dims, PROMPTS, Writing(16, GREEDY, seed=0))


@pytest.mark.parametrize(("name", "cp"), [(SHARED, 1), (SHARED, 2), *slow((DENSE, 1), (DENSE, 2))])
def test_greedy_tokens_are_those_of_transformers(pool: WorkerPool, tmp_path: Path, name: str, cp: int) -> None:
    """Texts longer than the window of 5 tokens."""
    with in_double(), torch.no_grad():
        theirs = hf_decoder(*MODELS[name])
        theirs.generation_config.eos_token_id = None
        wanted = []
        for prompt in PROMPTS:
            ids = theirs.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, pad_token_id=0)
            wanted.append(ids[0, len(prompt) :].tolist())
    assert len({token for text in wanted for token in text}) > 3, "the model speaks"
    theirs.save_pretrained(tmp_path)
    assert pool.run(cp, written_case, str(tmp_path), cp) == cp * [wanted]


def packed_case(folder: str, cp: int, mistake: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of this rank, and their logits, for packed documents."""
    tokens = torch.tensor([[i * 7 % 50 for length in LENGTHS for i in range(length)]])
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    sources = (lambda _: {3: 1, 4: 0, 5: 1}) if mistake == "layer" else key_sources
    with ExitStack() as stack:
        for module in (block, decoder):
            stack.enter_context(mock.patch.object(module, "key_sources", sources))
        part, job, dims = stack.enter_context(loaded(folder, cp))
        settings = {"buffers": [tokens, positions], "buffer_seq_dims": [1, 1], "options": job.attention}
        settings["mask"] = None if mistake == "border" else documents(LENGTHS)
        with torch.no_grad(), context_parallel(dims["cp"], sequences=1, **settings) as region:
            hidden = part(tokens, positions=positions, attention_plan=region.attention_plan)
            return own_positions(region.attention_plan, tokens.device), part.output(hidden)[0]


@pytest.mark.parametrize(
    ("cp", "mistake"), [(1, ""), (2, ""), (1, "border"), (1, "layer"), *slow((3, ""), (2, "border"), (2, "layer"))]
)
def test_packed_documents_have_the_logits_of_each_alone(
    pool: WorkerPool, tmp_path: Path, cp: int, mistake: str
) -> None:
    """A document that sees the one before it, or the keys of another layer, has other logits."""
    with in_double(), torch.no_grad():
        theirs = hf_decoder(*MODELS[SHARED])
        texts = [[i * 7 % 50 for i in range(length)] for length in LENGTHS]
        wanted = torch.cat([theirs(torch.tensor([text])).logits[0] for text in texts])
    theirs.save_pretrained(tmp_path)
    got = pool.run(cp, packed_case, str(tmp_path), cp, mistake)
    rows = torch.cat([rows for rows, _ in got])
    assert sorted(rows.tolist()) == [*range(sum(LENGTHS))]
    error = (torch.cat([logits for _, logits in got]) - wanted[rows]).abs().max()
    assert error > 1e-3 if mistake else error < 1e-10


SHARED_LAYOUTS = {name: layout for name, layout in LAYOUTS.items() if name != "pp2"} | {
    "cp2, exchanged keys are kept": (2, [*degrees(cp=2), A2A, "--parallelism.context_parallel_keep_exchanged"]),
    "cp2, a head at a time": (2, [*degrees(cp=2), A2A, "--parallelism.context_parallel_heads_per_pass=1"]),
    "in chunks": (1, ["--training.sequence_chunks=3"]),
    "fsdp2, whole layers": (2, [*degrees(dp_shard=2), "--activation_checkpoint.mode=full"]),
    "fsdp2, each operator": (2, [*degrees(dp_shard=2), "--activation_checkpoint.mode=selective"]),
    "fsdp2, inputs on the host": (
        2,
        [*degrees(dp_shard=2), "--activation_checkpoint.mode=full", "--activation_checkpoint.offload=inputs"],
    ),
    "cp2, head_tail, ring": (
        2,
        [
            *degrees(cp=2),
            "--parallelism.context_parallel_method=ring",
            "--parallelism.context_parallel_load_balancer=head_tail",
        ],
    ),
}
SHARED_QUICK = "cp2+tp2", "fsdp2, each operator"


@pytest.mark.parametrize(
    "layout",
    [*SHARED_QUICK, *slow(*(name for name in SHARED_LAYOUTS if name not in SHARED_QUICK))],
)
def test_shared_keys_and_embeddings_of_layers_are_as_on_one_process(pool: WorkerPool, layout: str) -> None:
    """Gradients of keys and values come from several layers; packed documents, so that windows and positions count."""
    ranks, arguments = SHARED_LAYOUTS[layout]
    model = ["--model.name=gemma4", "--model.flavor=tiny_shared", "--training.dtype=float64"]
    model += ["--training.attention_mask=document", "--training.steps=3"]
    got = pool.run(ranks, run_layout, [*model, *arguments])[0]
    assert_parity(got, reference(pool, *model), 1e-10)


EXPERT_LAYOUTS = {
    "fsdp2+ep2": (2, [*degrees(dp_shard=2), ep(2)]),
    "cp2+tp2+ep2": (4, [*degrees(cp=2, tp=2), ep(2)]),
    "fsdp2, in parts": (2, [*degrees(dp_shard=2), "--activation_checkpoint.mlp_chunk_tokens=5"]),
    "fsdp2, compiled": (2, [*degrees(dp_shard=2), "--compile.enable", "--compile.backend=aot_eager"]),
}


@pytest.mark.parametrize("layout", ["cp2+tp2+ep2", *slow("fsdp2+ep2", "fsdp2, in parts", "fsdp2, compiled")])
def test_experts_next_to_a_dense_network_are_as_on_one_process(pool: WorkerPool, layout: str) -> None:
    ranks, arguments = EXPERT_LAYOUTS[layout]
    model = ["--model.name=gemma4", "--model.flavor=tiny_experts", "--training.dtype=float64"]
    model += ["--training.attention_mask=document", "--training.steps=3"]
    got = pool.run(ranks, run_layout, [*model, *arguments])[0]
    assert_parity(got, reference(pool, *model), 1e-10)
