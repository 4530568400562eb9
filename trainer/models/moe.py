"""A mixture of experts replaces a feed-forward network: a router, experts, and two ways to balance the experts.

Both ways use the load of the experts: their shares of all choices of a step, over the whole batch. Each router counts
the choices of its forwards with gradients. Once a step, `ExpertBalance` sums the counts over all ranks.

The auxiliary loss (arXiv 2101.03961) is the loss of transformers, over all layers together:

    coefficient * E * sum over experts of f_e * P_e

P_e is the mean probability of expert e, over the tokens of the step and the layers. f_e is the mean number of choices
of expert e per token, over the layers; the sum of all f_e is k. Padding counts as no token.

By default f_e comes from the step BEFORE. So the loss is exact on every layout, with any number of micro-batches and
ranks, and its forward needs no collective. In the first step all f_e are equal, and the gradient is zero. With
`router_aux_loss_load = "micro_batch"` f_e comes from each micro-batch, as in transformers, but over all ranks: the
layers' choices are summed between forward and backward.

The bias (arXiv 2408.15664) is added to the logits for the choice alone, never to weights. After each step, the bias of
an expert with less than the mean load rises by the update rate. The bias of an expert with more load falls by it. A
router of sigmoids (arXiv 2412.19437) adds the bias to the sigmoids, even without an update rate: there the bias is one
of the weights.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import SequenceParallel

from longshard.sharding.exchange import all_reduce
from longshard.sharding.tensors import wide_type, with_adjoint
from trainer.families.args import expert_layers
from trainer.families.feed_forward_args import DenseArgs, ExpertArgs
from trainer.models.auxiliary_loss import AuxiliaryLoss
from trainer.models.experts import Experts
from trainer.models.feed_forward import FeedForward
from trainer.observer import Observer, Positions
from trainer.parallel.parallel_dims import ParallelDims
from trainer.parallel.tensor_parallel import OwnPositions, Styles, prefixed


class Gate(nn.Linear):
    """Linear module that computes in float32 or wider.

    The constructor takes the arguments of `nn.Linear`.
    """

    muon_matrices = ()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output in float32 or wider, (..., outputs).

        Args:
            x: (..., inputs).
        """
        dtype = wide_type(x.dtype)
        return F.linear(
            x.to(dtype),
            self.weight.to(dtype),
            None if self.bias is None else self.bias.to(dtype),
        )


class Router(nn.Module):
    """Chooses experts for each token.

    Buffers, (E,): `load`, each expert's share of the choices of the last step; `mean_load`, its mean over all layers;
    `selection_bias`; `count`, this rank's choices in this step.

    Args:
        dim: Channels of the hidden states.
        args: Number of experts, experts per token, and how weights are computed.
        aux_loss_coef: Coefficient of the auxiliary loss, divided by the number of layers with experts.
        bias_update_rate: Change of a selection bias per step; 0 without updates.
    """

    def __init__(
        self,
        dim: int,
        args: ExpertArgs,
        *,
        aux_loss_coef: float = 0.0,
        bias_update_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.args = args
        self.number = args.number
        self.per_token = args.per_token
        self.aux_loss_coef = aux_loss_coef
        self.bias_update_rate = bias_update_rate
        self.gate = Gate(dim, args.number, bias=args.biases)
        self.auxiliary = AuxiliaryLoss()
        for name in ("load", "mean_load", "selection_bias"):
            self.register_buffer(name, torch.empty(args.number), persistent=name != "mean_load")
        self.register_buffer(
            "count", torch.empty(args.number, dtype=torch.int64), persistent=False
        )

    def forward(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token.

        With gradients it also adds the choices to `count`, in place, and the gradient of the auxiliary loss to the
        backward.

        Args:
            x: (N, dim).
            real: (N,), bool, False for padding, which counts as no load. None without padding.

        Returns:
            The experts of each token, (N, k), int64, and their weights, (N, k), in float32 or wider.
        """
        logits = self.gate(x)
        chosen = self._chosen(logits.detach())
        args = self.args
        if args.sigmoid:
            weights = logits.sigmoid().gather(1, chosen)
            if args.normalise:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        elif args.normalise:
            weights = logits.gather(1, chosen).softmax(-1)
        else:
            weights = logits.softmax(-1).gather(1, chosen)
        weights = weights if args.scale == 1 else weights * args.scale
        if torch.is_grad_enabled():
            counted = (
                torch.ones_like(chosen)
                if real is None
                else real.long().unsqueeze(1).expand_as(chosen)
            )
            self.count.scatter_add_(0, chosen.flatten(), counted.flatten())
            if self.aux_loss_coef:
                shares = logits.softmax(-1)
                if real is not None:
                    shares = torch.where(real.unsqueeze(1), shares, 0)
                # the backward reads its values at that time; `_count` may set them after the forward
                load = self.mean_load
                loss = with_adjoint(
                    shares.sum(0), lambda x: x @ load, lambda dloss: dloss * load
                )
                loss = self.aux_loss_coef * self.number * self.per_token * loss
                weights = self.auxiliary(weights, loss)
        return chosen, weights

    def _chosen(self, logits: Tensor) -> Tensor:
        """Return the experts with the highest scores of each token, (N, k), int64.

        Scores are the logits or their sigmoids, (N, E), plus the selection bias. With groups, only experts of the best
        groups of a token are chosen.
        """
        args = self.args
        scores = logits.sigmoid() if args.sigmoid else logits
        if self.bias_update_rate or args.sigmoid:
            scores = scores + self.selection_bias
        if args.groups > 1:
            by_group = scores.unflatten(1, (args.groups, -1))
            best = (
                by_group.topk(2, dim=-1)
                .values.sum(-1)
                .topk(args.groups_per_token, dim=-1)
                .indices
            )
            others = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(1, best, False)
            scores = by_group.masked_fill(others.unsqueeze(-1), -torch.inf).flatten(1)
        return scores.topk(self.per_token, dim=-1).indices

    def init_buffers(self, device: torch.device) -> None:
        """Set equal loads, no bias and no counts. Loads and bias are in float32 or wider, counts are int64.

        Args:
            device: The device of the buffers.
        """
        dtype = wide_type(self.gate.weight.dtype)
        self.load = torch.full((self.number,), 1 / self.number, dtype=dtype, device=device)
        self.mean_load = self.load.clone()
        self.selection_bias = torch.zeros_like(self.load)
        self.count = torch.zeros_like(self.load, dtype=torch.int64)


class MoE(nn.Module):
    """A router and its experts, and optionally an expert that all tokens share.

    Args:
        dim: Channels of the hidden states.
        args: The sizes of the experts and of the shared expert.
        branches: Residual branches of the model, see `initialization.draw`.
        **rates: See `Router`.
    """

    def __init__(
        self, dim: int, args: ExpertArgs, *, branches: int = 1, **rates: float
    ) -> None:
        super().__init__()
        self.router = Router(dim, args, **rates)
        self.experts = Experts(dim, args, branches=branches)
        self.shared = (
            FeedForward(dim, DenseArgs(args.shared_dim, args.activation), branches=branches)
            if args.shared_dim
            else None
        )
        self.shared_gate = Gate(dim, 1, bias=False) if args.shared_gate else None

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the output, (B, S, dim).

        Args:
            x: (B, S, dim).
            positions: (B, S), negative for padding. None without padding.
        """
        real = None if positions is None else (positions >= 0).flatten()
        rows = x.flatten(0, 1)
        out, shared = self.experts(
            rows, *self.router(rows, real), meanwhile=partial(self.shared_output, x)
        )
        return out.view_as(x) if shared is None else out.view_as(x) + shared

    def tensor_parallel_styles(self) -> Styles:
        """Return how tensor-parallel ranks divide this module: each rank computes the outputs of its own tokens."""
        gate = SequenceParallel(sequence_dim=0, use_local_output=True)
        styles = {"": OwnPositions(), "router.gate": gate}
        if self.shared is not None:
            styles |= prefixed("shared", self.shared.tensor_parallel_styles())
        if self.shared_gate is not None:
            styles["shared_gate"] = SequenceParallel(use_local_output=True)
        return styles

    def compiled_methods(self) -> list[tuple[nn.Module, str]]:
        """Return the methods that are compiled. Experts are not: only the routing knows their numbers of rows."""
        return [] if self.shared is None else [(self, "shared_output")]

    def shared_output(self, x: Tensor) -> Tensor | None:
        """Return the output of the expert that all tokens share, (B, S, dim). None without such an expert.

        Args:
            x: (B, S, dim).
        """
        if self.shared is None:
            return None
        out = self.shared(x)
        return (
            out if self.shared_gate is None else out * self.shared_gate(x).sigmoid().type_as(x)
        )


class ExpertBalance(Observer):
    """Keeps the loads of the experts, updates the biases of routers, and reports how even the loads are.

    Args:
        model_parts: The model parts of this rank.
        dims: The meshes of the run.
    """

    def __init__(self, model_parts: Sequence[nn.Module], dims: ParallelDims) -> None:
        self._args = model_parts[0].args
        self._dims = dims
        self._routers = routers_of(model_parts)
        """By layer, in the order of the forward."""
        if expert_layers(self._args) and self._args.router_aux_loss_load == "micro_batch":
            model_parts[0].register_forward_pre_hook(lambda *_: self._count(before=True))
            model_parts[0].register_forward_hook(lambda *_: self._count(before=False))

    def _count(self, *, before: bool) -> None:
        """Set the mean load from the choices of one forward with gradients. Nothing happens without gradients.

        Before the forward it keeps this rank's counts. After the forward it sums the new choices over all ranks: one
        collective.
        """
        if not torch.is_grad_enabled():
            return
        counts = torch.stack([router.count for router in self._routers.values()])
        if before:
            self._counted = counts
            return
        counts = all_reduce(counts - self._counted, self._dims["dp_cp_tp"])
        mean = (counts.double() / counts.sum(1, keepdim=True).clamp(min=1)).mean(0)
        for router in self._routers.values():
            router.mean_load.copy_(mean)

    @torch.no_grad()
    def start_step(self) -> None:
        """Give every router the mean load of each expert in the step before, over all layers of the model.

        With pipelines this is one collective. Nothing happens without an auxiliary loss, or if its load is per
        micro-batch.
        """
        args = self._args
        dims = self._dims
        if (
            not expert_layers(args)
            or args.router_aux_loss_coef == 0
            or args.router_aux_loss_load == "micro_batch"
        ):
            return
        total = dims.zeros(args.experts.number)
        for router in self._routers.values():
            total += router.load
        mean = all_reduce(total, dims["pp"]) / len(expert_layers(args))
        for router in self._routers.values():
            router.mean_load.copy_(mean)

    @torch.no_grad()
    def end_step(self, left_out: Tensor) -> None:
        """Set the loads of the step, update the biases, and reset the counts. One collective, if there are routers.

        A recomputed block counts its tokens twice, which changes no share. If the step has no update, the loads and the
        biases stay unchanged.

        Args:
            left_out: A scalar, nonzero if the step has no update.
        """
        routers = [*self._routers.values()]
        left_out = left_out.bool()
        if not routers:
            return
        # A forward sees the tokens of this rank only.
        counts = all_reduce(
            torch.stack([router.count for router in routers]), self._dims["dp_cp_tp"]
        )
        for router, count in zip(routers, counts, strict=True):
            load = count.to(router.load.dtype) / count.sum().clamp(min=1)
            router.load.copy_(torch.where(left_out, router.load, load))
            router.count.zero_()
            if router.bias_update_rate:
                change = router.bias_update_rate * torch.sign(1 / router.number - router.load)
                router.selection_bias += torch.where(left_out, 0, change)

    def record(self, positions: Positions) -> dict[str, float | list[list[float]]]:
        """Return the load of each expert, divided by the mean load of an expert; empty without experts. One collective.

        "expert_load" has the loads by layer with experts, rounded to three decimals; "expert_imbalance" is the largest.

        Args:
            positions: Positions of the data streams; not used.
        """
        args = self._args
        if not (layers := expert_layers(args)):
            return {}
        loads = self._dims.zeros(len(layers), args.experts.number)
        for layer, router in self._routers.items():
            loads[layers.index(layer)] = router.load * router.number
        loads = [
            [round(load, 3) for load in layer]
            for layer in all_reduce(loads, self._dims["pp"]).tolist()
        ]
        return {"expert_imbalance": max(map(max, loads)), "expert_load": loads}


def routers_of(model_parts: Sequence[nn.Module]) -> dict[int, Router]:
    """Return the routers of these model parts by the number of their layer, in the order of the forward.

    Args:
        model_parts: Modules whose parameters' names begin with `layers.<number>`.
    """
    return {
        int(name.split(".")[1]): module
        for part in model_parts
        for name, module in part.named_modules()
        if isinstance(module, Router)
    }
