"""Which parameters Muon updates in every family, and how those that hold several matrices are divided."""

from collections.abc import Mapping
from itertools import pairwise

import pytest
import torch
from torch import nn

from longshard.sharding.ranges import Ranges, size
from tests.distributed.harness import FAMILY_FLAVORS, TEST_FLAVORS
from trainer.config.errors import ConfigError
from trainer.config.schema import LoRA
from trainer.job.memory import matrix_sizes
from trainer.models.matrices import matrices_of
from trainer.models.model_spec import model_spec
from trainer.transforms.lora import apply_lora

SHAPES = {"llama3": TEST_FLAVORS} | FAMILY_FLAVORS
CASES = [(family, flavor) for family, flavors in SHAPES.items() for flavor in flavors]
# Parameters with two dimensions and more that are no maps between features.
OTHERS = ("tok_embeddings", "layer_embeddings", "output", "gate", "in_ba", "wb", "f_a", "f_b", "g_a", "g_b", "in_dt")
OTHERS += ("in_beta", "in_decay", "_conv", "b13", "b2")


def model_of(family: str, flavor: str = "tiny", **changes: object) -> nn.Module:
    with torch.device("meta"):
        return model_spec(family).build(SHAPES[family][flavor])


def matrices_by_name(model: nn.Module, **how: bool) -> Mapping[str, tuple[Ranges, ...]]:
    matrices = matrices_of([model], **how)
    return {name: matrices[p] for name, p in model.named_parameters() if p in matrices}


@pytest.mark.parametrize(("family", "flavor"), CASES)
@pytest.mark.parametrize("per_head", [False, True])
def test_each_parameter_of_a_family_is_in_one_group(family: str, flavor: str, per_head: bool) -> None:
    """Each row of a matrix belongs to one group; other parameters are vectors or known exceptions."""
    model = model_of(family, flavor)
    matrices = matrices_by_name(model, per_head=per_head)
    for name, parameter in model.named_parameters():
        if name in matrices:
            rows = sorted(part for matrix in matrices[name] for part in matrix)
            assert rows[0][0] == 0
            assert rows[-1][1] == parameter.shape[:-1].numel()
            assert all(a[1] == b[0] for a, b in pairwise(rows))
            assert not any(other in name.split(".")[-2:] for other in OTHERS), name
        else:
            owner = name.removesuffix(".weight").split(".")[-1]
            assert parameter.ndim == 1 or any(owner == other or owner.endswith(other) for other in OTHERS), name


@pytest.mark.parametrize(("family", "flavor"), CASES)
def test_the_job_counts_what_is_found(family: str, flavor: str) -> None:
    """By name and size, before PyTorch is imported."""
    model = model_of(family, flavor)
    sizes = {
        name.removesuffix(".weight"): p.numel()
        for name, p in model.named_parameters()
        if name in matrices_by_name(model)
    }
    assert matrix_sizes(SHAPES[family][flavor]) == sizes


def test_a_matrix_is_divided_by_what_its_rows_are() -> None:
    args = SHAPES["qwen3_next"]["tiny"]
    matrices, linear = matrices_by_name(model_of("qwen3_next")), args.linear
    (name,) = {name for name in matrices if name.endswith("0.attention.in_qkvz.weight")}
    queries, keys, values, gates = matrices[name]
    shared = linear.value_heads // linear.key_heads
    assert [size(rows) for rows in (queries, keys)] == [linear.key_heads * linear.key_dim] * 2
    assert [size(rows) for rows in (values, gates)] == [linear.value_heads * linear.value_dim] * 2
    head = 2 * linear.key_dim + 2 * shared * linear.value_dim
    assert queries[1] == (head, head + linear.key_dim)
    gates_and_ups = matrices[next(name for name in matrices if name.endswith("experts.w13"))]
    assert [size(rows) for rows in gates_and_ups] == [args.experts.hidden_dim] * 2 * args.experts.number
    assert len(matrices[next(name for name in matrices if name.endswith("experts.w2"))]) == args.experts.number
    gated = next(name for name in matrices if name.endswith("wq.weight"))
    assert [size(rows) for rows in matrices[gated]] == [args.n_heads * args.head_dim] * 2
    apart = matrices_by_name(model_of("qwen3_next"), per_head=True)
    assert {size(rows) for rows in apart[gated]} == {args.head_dim}
    assert len(apart[gated]) == 2 * args.n_heads
    latent = SHAPES["deepseek_v3"]["tiny"].latent
    up = next(rows for name, rows in matrices_by_name(model_of("deepseek_v3")).items() if name.endswith("wkv_b.weight"))
    assert up[0][0] == (0, latent.nope_dim)
    assert up[1][0] == (latent.nope_dim, latent.nope_dim + latent.value_dim)


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixing, self.scale = nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.zeros(3))


def test_a_module_of_another_kind_must_say_what_it_has() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Other())
    with pytest.raises(ConfigError, match=r"whether 1\.mixing, of a module Other, is a matrix; give Other"):
        matrices_of([model])
    for names, wanted in ((("mixing",), {"0.weight", "1.mixing"}), ((), {"0.weight"})):
        Other.muon_matrices = names
        try:
            assert set(matrices_by_name(model)) == wanted
        finally:
            del Other.muon_matrices


def test_a_tied_matrix_an_adapter_and_what_is_frozen_are_none() -> None:
    assert not any("tok_embeddings" in name for name in matrices_by_name(model_of("llama3", "tiny_tied")))
    model = model_of("llama3")
    apply_lora(model, LoRA(rank=2))
    assert matrices_by_name(model) == {}


def test_a_shared_parameter_is_a_matrix_everywhere_or_nowhere() -> None:
    model = nn.ModuleDict({"first": nn.Embedding(6, 4), "second": nn.Linear(4, 6, bias=False)})
    model["second"].weight = model["first"].weight
    with pytest.raises(ConfigError, match=r"first\.weight is a matrix in one module and none in another"):
        matrices_of([model])
    model["second"].muon_matrices = ()
    assert matrices_of([model]) == {}
