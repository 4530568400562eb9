"""Laws of a mixture of experts on one process: no token is dropped, and each gets the weighted sum of its experts."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from trainer.components.optimizer import build_optimizer
from trainer.config.schema import JobConfig, LoRA, Optimizer
from trainer.families.feed_forward_args import ExpertArgs
from trainer.families.registry import MODELS
from trainer.models import experts as experts_module
from trainer.models import moe
from trainer.models.experts import CLAMPED, Experts
from trainer.models.model_spec import model_spec
from trainer.models.moe import MoE, Router
from trainer.transforms.lora import apply_lora

DIM = 16


def drawn(module: torch.nn.Module, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    torch.manual_seed(0)
    module.to(dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    return module


def token_by_token(module: Experts, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The definition: one product for each pair of token and expert."""
    out = []
    for row, numbers, shares in zip(x, chosen.tolist(), weights, strict=True):
        total = 0
        for e, share in zip(numbers, shares, strict=True):
            hidden = module.w13[e] @ row + (0 if module.b13 is None else module.b13[e])
            gate, up = hidden.chunk(2)
            if module.activation == CLAMPED:
                gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
                hidden = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            else:
                hidden = F.silu(gate) * up
            total = total + share * (module.w2[e] @ hidden + (0 if module.b2 is None else module.b2[e]))
        out.append(total)
    return torch.stack(out)


def outputs_and_gradients(run, module: Experts, *inputs: torch.Tensor) -> list[torch.Tensor]:
    x, chosen, weights = inputs
    x, weights = (tensor.clone().requires_grad_() for tensor in (x, weights))
    out = run(x, chosen, weights)
    out = out[0] if run is module else out
    cotangent = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
    wanted = [x, weights, *module.parameters()]
    return [out, *torch.autograd.grad(out, wanted, cotangent)]


def case(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = 4 * torch.randn(11, DIM, generator=generator, dtype=dtype)
    scores = torch.randn(11, 6, generator=generator, dtype=dtype)
    scores[:, 3] = -9  # an expert that nobody chooses
    weights, chosen = scores.softmax(1).topk(2)
    return x, chosen, weights


@pytest.mark.parametrize("shape", [{}, {"biases": True, "clamped": True}])
def test_each_token_gets_the_weighted_sum_of_its_experts(shape: dict[str, bool]) -> None:
    module = drawn(Experts(DIM, ExpertArgs(6, 2, 24, **shape)))
    got = outputs_and_gradients(module, module, *case())
    wanted = outputs_and_gradients(lambda *inputs: token_by_token(module, *inputs), module, *case())
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [{}, {"biases": True, "clamped": True}])
def test_the_grouped_product_is_the_loop(shape: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """This test uses float32. On CPUs the product needs a contiguous gradient, which the gated unit returns."""
    module = drawn(Experts(DIM, ExpertArgs(6, 2, 24, **shape)), torch.float32)
    wanted = outputs_and_gradients(module, module, *case(torch.float32))
    monkeypatch.setattr(experts_module, "has_grouped_product", lambda *_: True)
    with monkeypatch.context() as patch:
        patch.setattr(experts_module, "_one_by_one", None)
        got = outputs_and_gradients(module, module, *case(torch.float32))
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hidden", [24, 12])
def test_bfloat16_is_multiplied_in_groups_where_rows_are_aligned(hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On any device, as near to float32 as the loop over experts, which other sizes take."""
    module = drawn(Experts(DIM, ExpertArgs(6, 2, hidden)), torch.bfloat16)
    inputs, exact = case(torch.bfloat16), drawn(Experts(DIM, ExpertArgs(6, 2, hidden)), torch.float32)
    exact.load_state_dict(module.state_dict())
    wanted = outputs_and_gradients(exact, exact, *(x.float() if x.is_floating_point() else x for x in inputs))
    grouped = hidden % 8 == 0
    with monkeypatch.context() as patch:
        patch.setattr(experts_module, "_one_by_one" if grouped else "_grouped", None)
        got = outputs_and_gradients(module, module, *inputs)
    for ours, theirs in zip(got, wanted, strict=True):
        assert (ours.float() - theirs).norm() < 2e-2 * theirs.norm()


def test_without_tokens_every_parameter_still_gets_a_gradient() -> None:
    module = drawn(Experts(DIM, ExpertArgs(6, 2, 24, biases=True)))
    x, chosen, weights = (tensor[:0] for tensor in case())
    assert all(not g.any() and g.shape for g in outputs_and_gradients(module, module, x, chosen, weights)[3:])


def test_weights_are_softmaxes_of_all_or_of_the_chosen_logits() -> None:
    x = case()[0]
    for normalise in (True, False):
        router = drawn(Router(DIM, ExpertArgs(6, 2, 24, normalise=normalise), aux_loss_coef=0, bias_update_rate=0))
        router.init_buffers(torch.device("cpu"))
        chosen, weights = router(x)
        shares = (x @ router.gate.weight.T).softmax(-1)
        wanted, places = shares.topk(2)
        assert torch.equal(chosen, places)
        torch.testing.assert_close(weights, wanted / wanted.sum(1, keepdim=True) if normalise else wanted)


def test_the_selection_bias_chooses_and_has_no_weight() -> None:
    router = drawn(Router(DIM, ExpertArgs(6, 2, 24), aux_loss_coef=0, bias_update_rate=0.1))
    router.init_buffers(torch.device("cpu"))
    x = case()[0]
    router.selection_bias[3] = 1e3
    chosen, weights = router(x)
    assert (chosen == 3).sum(1).eq(1).all()
    logits = (x @ router.gate.weight.T).gather(1, chosen)
    torch.testing.assert_close(weights, logits.softmax(1))


def test_choices_are_counted_with_gradients_only() -> None:
    moe = drawn(MoE(DIM, ExpertArgs(6, 2, 24)))
    moe.router.init_buffers(torch.device("cpu"))
    x = case()[0].unsqueeze(0)
    with torch.no_grad():
        moe(x)
    assert not moe.router.count.any()
    moe(x)
    assert moe.router.count.sum() == 22


def test_the_router_computes_in_float32_at_least() -> None:
    router = drawn(Router(DIM, ExpertArgs(6, 2, 24), aux_loss_coef=0, bias_update_rate=0), torch.bfloat16)
    router.init_buffers(torch.device("cpu"))
    assert router(case(torch.bfloat16)[0])[1].dtype == torch.float32
    assert router.load.dtype == torch.float32


@pytest.mark.parametrize("coefficient", [0.0, 0.5])
def test_padding_is_no_load_and_is_not_balanced(coefficient: float) -> None:
    """A router with padding counts, and learns, as one that gets the real tokens alone."""
    x = torch.randn(12, DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    real = torch.tensor([True, True, False] * 4)
    results = []
    for rows, mask in ((x, real), (x[real], None)):
        router = Router(DIM, ExpertArgs(6, 2, 8), aux_loss_coef=coefficient, bias_update_rate=0.0)
        router.init_buffers(torch.device("cpu"))
        drawn(router)
        router.mean_load.copy_(torch.arange(6) / 15)
        router.auxiliary.tokens = real.sum()
        chosen, weights = router(rows, mask)
        kept = weights if mask is None else weights[mask]
        kept.square().sum().backward()
        results.append((router.count, router.gate.weight.grad, chosen.shape))
    (count, gradient, _), (wanted, alone, _) = results
    assert count.tolist() == wanted.tolist()
    assert count.sum() == 2 * real.sum()
    assert (gradient - alone).norm() < 1e-12 * alone.norm()


def test_biases_bring_experts_to_equal_loads() -> None:
    """Their purpose: after some steps a skewed router sends each expert its share, and the overloaded one has paid."""
    router = Router(DIM, ExpertArgs(6, 2, 8), aux_loss_coef=0.0, bias_update_rate=0.05)
    router.init_buffers(torch.device("cpu"))
    drawn(router)
    args = SimpleNamespace(experts=ExpertArgs(6, 2, 8), n_layers=1, router_aux_loss_coef=0.0)
    args.router_aux_loss_load = "step_before"
    part = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([router])})  # `layers.0`, as in a decoder
    part.args = args
    x = torch.randn(512, DIM, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.5
    imbalances = []
    with mock.patch.object(moe, "all_reduce", lambda counts, _over: counts):
        for _ in range(60):
            router(x)
            moe.ExpertBalance([part], {"dp_cp_tp": None}).end_step(torch.zeros(()))
            imbalances.append(router.load.max().item() * 6)
            if len(imbalances) == 1:
                first = router.load.clone()
    assert imbalances[0] > 1.5
    assert imbalances[-1] < 1.15
    assert router.selection_bias[first.argmax()] < 0 < router.selection_bias[first.argmin()]


def test_a_model_whose_layers_are_all_dense_has_no_loads() -> None:
    """Published settings may have experts, and a list of dense layers that names all of them."""
    args = SimpleNamespace(experts=ExpertArgs(6, 2, 8), n_layers=2, layer=lambda _: SimpleNamespace(has_experts=False))
    args.router_aux_loss_coef, args.router_aux_loss_load = 0.01, "step_before"
    part = torch.nn.Module()
    part.args = args
    balance = moe.ExpertBalance([part], {})
    balance.start_step()
    balance.end_step(torch.zeros(()))
    assert balance.record({}) == {}


def test_matrices_of_experts_decay_and_their_biases_do_not() -> None:
    module = MoE(DIM, ExpertArgs(4, 2, 8, biases=True))
    names = {parameter: name for name, parameter in module.named_parameters()}
    groups = build_optimizer([module], JobConfig(optimizer=Optimizer(weight_decay=0.1))).param_groups
    decaying = {names[p] for group in groups if group["weight_decay"] for p in group["params"]}
    assert decaying == {"router.gate.weight", "experts.w13", "experts.w2"}
    assert set(names.values()) - decaying == {"router.gate.bias", "experts.b13", "experts.b2"}


def test_routers_get_no_adapters() -> None:
    """An adapter would move tokens to experts that have not learnt them."""
    with torch.device("meta"):
        model = model_spec("qwen3_moe").build(MODELS["qwen3_moe"].flavors["debugmodel"])
    apply_lora(model, LoRA(rank=2))
    adapted = {name.rsplit(".", 1)[0] for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".", 2)[2] for name in adapted} == {f"attention.{part}" for part in ("wq", "wk", "wv", "wo")}
