"""Law: each family computes what transformers computes, and trains on every layout as on one process."""

from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from lct_inference import generation
from longshard import ContextParallelOptions, context_parallel
from tests.distributed.harness import assert_parity, run_layout, whole
from tests.distributed.pool import WorkerPool
from tests.distributed.test_expert_hugging_face import beside_case, through_case
from tests.distributed.test_experts import ep
from tests.distributed.test_generation import opened
from tests.distributed.test_parity import degrees, reference
from tests.hf_families import MODELS, hf_decoder, in_double
from tests.hf_tensors import to_hf
from tests.slow import slow
from tests.unit.test_expert_hugging_face import relative, whole_folder
from trainer.checkpoint.weights import load_weights
from trainer.config.schema import Model
from trainer.hugging_face.folder import HFFolder
from trainer.hugging_face.reader import HFReader
from trainer.models.auxiliary_loss import normalise_auxiliary_losses
from trainer.models.linear_attention import Decay
from trainer.models.model_spec import hf_model, model_spec

pytestmark = pytest.mark.about(
    "trainer/models/linear_attention.py", "trainer/families/sparse.py", "trainer/families/sparse_attention.py"
)


def both_ways(family: str, folder: str, texts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the token after each text, read as a whole, and token by token behind its first half."""
    with opened(Model(name=family, flavor=folder)) as (part, job, dims), torch.no_grad():
        load_weights([HFReader(HFFolder(Path(folder)), hf_model(model_spec(family), job.model))], [part])
        logits = partial(generation._logits, part, job, dims)
        steps = []
        for text in texts:
            grown = text[: (len(text) + 1) // 2]
            reading = logits([grown], len(text))
            steps.append(next(reading)[0])
            for token in text[len(grown) :]:
                grown.append(token)
                steps[-1] = next(reading)[0]
        return next(logits(texts, max(map(len, texts)))), torch.stack(steps)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    family, args = MODELS[name]
    texts = [[i * 7 % 50 for i in range(length)] for length in (1, 29)]
    with in_double(), torch.no_grad():
        theirs = hf_decoder(family, args)
        wanted = [theirs(torch.tensor([text])).logits[0, -1] for text in texts]
    theirs.save_pretrained(tmp_path)
    for got in pool.run(1, both_ways, family, str(tmp_path), texts)[0]:
        for logits, right in zip(got, wanted, strict=True):
            assert relative(logits, right) < 1e-10


STEP = {"lr": 1e-2, "weight_decay": 0.1}
BIASES = "correction_bias", "expert_bias"
"""Biases of routers, which have no gradient."""


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    labels = torch.arange(logits[..., 0].numel()) * 11 % 50
    return F.cross_entropy(logits.flatten(0, 1), labels)


def gradients_case(family: str, folder: str, tokens: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Gradients, and weights after a step of AdamW, by names of transformers; the attention is planned."""
    spec = model_spec(family)
    with opened(Model(name=family, flavor=folder)) as (part, job, dims):
        load_weights([HFReader(HFFolder(Path(folder)), hf_model(spec, job.model))], [part])
        options = job.attention or ContextParallelOptions()
        settings = {"buffer_seq_dims": [1], "options": options, "local_attention": True}
        normalise_auxiliary_losses(part, torch.ones(()))
        with context_parallel(dims["cp"], buffers=[tokens], **settings) as cp:
            plan = cp.attention_plan if job.attention else None
            loss_of(part.output(part(tokens, attention_plan=plan))).backward()
        gradients = to_hf(spec, job.model, ((name, whole(p.grad)) for name, p in part.named_parameters()))
        torch.optim.AdamW(part.parameters(), **STEP).step()
        weights = to_hf(spec, job.model, ((name, whole(p.detach())) for name, p in part.named_parameters()))
        return [gradients, weights]


@pytest.mark.parametrize("name", [*MODELS])
def test_gradients_and_a_step_are_those_of_transformers(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    family, args = MODELS[name]
    tokens = (torch.arange(48) * 7 % 49 + 1).view(2, 24)  # 0 is padding there, which has no gradient
    with in_double():
        theirs = hf_decoder(family, args)
        theirs.save_pretrained(tmp_path / "weights")
        loss_of(theirs(tokens).logits).backward()
        for parameter in theirs.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.optim.AdamW(theirs.parameters(), **STEP).step()
        theirs.save_pretrained(tmp_path / "stepped")  # under the names of files
        for parameter in theirs.parameters():
            parameter.data = parameter.grad
        theirs.save_pretrained(tmp_path / "gradients")
    results = pool.run(1, gradients_case, family, str(tmp_path / "weights"), tokens)[0]
    for kind, got in zip(("gradients", "stepped"), results, strict=True):
        tensors = whole_folder(tmp_path / kind)
        wanted = {x: tensor for x, tensor in tensors.items() if not x.endswith((*BIASES, "layer_scalar"))}
        assert got.keys() == wanted.keys()
        # an indexer learns by a loss that transformers does not have; test_sparse_attention.py has its gradients
        wanted = {there: tensor for there, tensor in wanted.items() if ".indexer." not in there}
        largest = max(tensor.norm() for tensor in wanted.values())
        for there, tensor in wanted.items():
            assert (got[there] - tensor).norm() <= 1e-10 * max(tensor.norm(), 1e-6 * largest), (kind, there)


@pytest.mark.parametrize(
    "name",
    ["phi3, a window, heads rotated in part", "qwen3_next", "deepseek_v3", *slow("gemma3", "minimax_m2", "glm4_moe")],
)
def test_ranks_read_their_parts_and_write_all(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    """Parts of fused matrices, biases for the choice, and tied matrices, through a checkpoint."""
    family, args = MODELS[name]
    with in_double():
        hf_decoder(family, args).save_pretrained(tmp_path / "hf")
    arguments = [*degrees(tp=2), *([] if args.experts is None else [ep(2)])]
    written = pool.run(2, through_case, family, str(tmp_path / "hf"), str(tmp_path / "run"), arguments)[0]
    original, back = whole_folder(tmp_path / "hf"), whole_folder(Path(written))
    assert original.keys() == back.keys()
    assert [x for x, tensor in original.items() if not torch.equal(back[x], tensor)] == []


def decay_types_case(arguments: list[str]) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """Return the types in which a run computes decays, and the types of their inputs."""
    forward, computed, input_types = Decay.forward, set(), set()

    def seen(module: Decay, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        input_types.add(x.dtype)
        decays = forward(module, x)
        computed.update(part.dtype for part in (module.a_log.weight, module.dt_bias.weight, *decays))
        return decays

    with mock.patch.object(Decay, "forward", seen):
        run_layout(arguments)
    return computed, input_types


@pytest.mark.parametrize("family", ["kimi_linear", *slow("qwen3_next", "granitemoehybrid")])
def test_decays_are_in_float32_beside_bfloat16(pool: WorkerPool, family: str) -> None:
    """FSDP casts other parameters to bfloat16, but not the parameters of decays."""
    arguments = [f"--model.name={family}", "--training.mixed_precision_param=bfloat16", *degrees(dp_shard=2)]
    assert pool.run(2, decay_types_case, arguments) == 2 * [({torch.float32}, {torch.bfloat16})]


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("kimi_linear", ["wq", "wkv_a", "f_b", "wo"]),
        *slow(("kimi_linear", ["wk", "g_a", "wb"]), ("qwen3_5_moe", ["in_q", "in_v", "in_z", "in_decay", "wo"])),
    ],
)
def test_adapters_of_hybrid_layers_train_on_ranks(
    pool: WorkerPool, tmp_path: Path, family: str, modules: list[str]
) -> None:
    family, args = MODELS[family]
    with in_double():
        hf_decoder(family, args).save_pretrained(tmp_path / "hf")
    case = beside_case, family, modules, str(tmp_path / "hf")
    wanted = pool.run(1, *case, [])[0]
    got = pool.run(4, *case, [*degrees(cp=2, tp=2), ep(2)])[0]
    assert_parity(got, wanted, 1e-10)


A2A = "--parallelism.context_parallel_method=all_to_all"
LAYOUTS = {
    "fsdp2": (2, degrees(dp_shard=2)),
    "cp2": (2, degrees(cp=2)),
    "cp2, all_to_all": (2, [*degrees(cp=2), A2A]),
    "tp2": (2, degrees(tp=2)),
    "pp2": (2, degrees(pp=2)),
    "cp2+tp2": (4, degrees(cp=2, tp=2)),
    "tp2, compiled": (2, [*degrees(tp=2), "--compile.enable", "--compile.backend=aot_eager"]),
    "fsdp2, in parts": (2, [*degrees(dp_shard=2), "--activation_checkpoint.mlp_chunk_tokens=5"]),
}
NEW = dict.fromkeys(family for family, _ in MODELS.values() if family not in ("qwen3", "qwen3_moe"))
QUICK = {(family, layout) for family in ("olmo3", "deepseek_v3", "granitemoehybrid") for layout in ("cp2+tp2", "tp2")}
QUICK |= {("smollm3", "pp2"), ("gemma3", "tp2"), ("qwen3_next", "cp2"), ("kimi_linear", "tp2")}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=[] if (family, layout) in QUICK else pytest.mark.slow)
        for family in NEW
        for layout in LAYOUTS
    ],
)
def test_a_layout_equals_one_process(pool: WorkerPool, family: str, layout: str) -> None:
    """Three steps. With experts these are divided, too; packed documents, so that windows and positions count."""
    ranks, arguments = LAYOUTS[layout]
    model = [f"--model.name={family}", "--training.dtype=float64", "--training.attention_mask=document"]
    model.append("--training.steps=3")
    if dict(MODELS.values())[family].experts is not None:
        model.append("--model.router_bias_update_rate=0.01")
        arguments = [*arguments, *([] if layout == "pp2" else [ep(2)])]
    got = pool.run(ranks, run_layout, [*model, *arguments])[0]
    assert_parity(got, reference(pool, *model), 1e-10)
