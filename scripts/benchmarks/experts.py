"""A mixture of experts against a dense model of the same active FLOPs: tokens a second, time of a layer, bytes sent.

One process runs two decoders and two layers forward and backward, one after another in each round. Then ranks share the
same tokens and the same experts of the layer. The benchmark counts bytes where the program calls collectives, and
compares them with the plan's bytes.

python scripts/benchmarks/experts.py --tokens 2048 --degrees 2
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not

import torch
import torch.distributed as dist
from torch import nn

from longshard.sharding import exchange
from scripts.benchmarks.teams import Row, Team, Times, span
from trainer.families.decoder_args import TransformerArgs
from trainer.families.feed_forward_args import DenseArgs, ExpertArgs
from trainer.job.experts import dispatch_bytes, ranks_of_a_token
from trainer.models.decoder import Transformer
from trainer.models.experts import ExpertWeights, expert_sums
from trainer.models.feed_forward import FeedForward
from trainer.models.moe import MoE
from trainer.parallel.expert_parallel import ROUTING, DispatchPlan, dispatched_sums


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tokens", type=int, default=4096, help="tokens of all ranks together")
    p.add_argument("--dim", type=int, default=256)
    p.add_argument("--hidden", type=int, default=128, help="width of one expert")
    p.add_argument("--experts", type=int, default=16)
    p.add_argument("--per-token", type=int, default=4)
    p.add_argument("--layers", type=int, default=4, help="layers of the two models")
    p.add_argument("--degrees", type=int, nargs="+", default=[2], help="ranks; each divides the experts")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--rounds", type=int, default=5)
    return p


class Layer:
    """The layers and models of one process: all experts and tokens, or in a process group the rank's part.

    Args:
        settings: The command line.
    """

    def __init__(self, settings: argparse.Namespace) -> None:
        torch.manual_seed(0)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (None, 1)
        self.s = settings
        self.rank = rank
        self.args = ExpertArgs(settings.experts, settings.per_token, settings.hidden)
        how = {"dtype": getattr(torch, settings.dtype), "device": settings.device}
        self.moe = MoE(settings.dim, self.args).to(**how)
        self.moe.router.init_buffers(torch.device(settings.device))
        self.dense = FeedForward(settings.dim, DenseArgs(settings.hidden * settings.per_token)).to(**how)
        for parameter in (*self.moe.parameters(), *self.dense.parameters()):
            nn.init.normal_(parameter, 0.0, 0.05)
        x = torch.randn(settings.tokens, settings.dim, **how)
        self.x = (x if rank is None else x.chunk(ranks)[rank]).clone().requires_grad_()
        if rank is None:
            self.models = {f"{kind}_model": self._model(kind, how) for kind in ("dense", "experts")}
        else:
            shares = {name: w.detach().chunk(ranks)[rank].clone() for name, w in self.moe.experts.named_parameters()}
            self.weights = ExpertWeights(**{name: nn.Parameter(share) for name, share in shares.items()})

    def _model(self, kind: str, how: dict[str, object]) -> Transformer:
        """Return a decoder with the dense or the expert layers; attention and output are the same in both."""
        s = self.s
        sizes = {"dim": s.dim, "n_layers": s.layers, "n_heads": s.dim // 32, "n_kv_heads": s.dim // 32}
        args = TransformerArgs(**sizes, ffn_hidden_dim=s.hidden * s.per_token, vocab_size=1024, max_seq_len=s.tokens)
        model = Transformer(replace(args, experts=self.args) if kind == "experts" else args).to(**how)
        model.init_buffers(torch.device(s.device))
        for parameter in model.parameters():
            nn.init.normal_(parameter, 0.0, 0.05)
        return model

    def experts(self) -> torch.Tensor:
        """Return the output of the layer of experts for this process's tokens, (tokens, dim) or (1, tokens, dim)."""
        if self.rank is None:
            return self.moe(self.x.unsqueeze(0))

        def sums(*rows: torch.Tensor, **sizes: object) -> torch.Tensor:
            return expert_sums(*rows, self.weights, **sizes)

        chosen, weights = self.moe.router(self.x)
        return dispatched_sums(self.x, chosen, weights, sums, self._plan(chosen))[0]

    def _plan(self, chosen: torch.Tensor) -> DispatchPlan:
        return ROUTING.plan(chosen, len(self.weights.w13), dist.group.WORLD)

    def run(self, kind: str) -> Times:
        """Run a layer or a decoder once, forward and backward.

        Args:
            kind: `experts` or `dense` for a layer, `experts_model` or `dense_model` for a decoder.

        Returns:
            The times of the run.
        """
        self._wait()
        start = time.monotonic()
        cpu = time.process_time()
        if kind.endswith("_model"):
            model = self.models[kind]
            out = model.output(model(torch.arange(self.s.tokens, device=self.s.device).unsqueeze(0) % 1024))
        else:
            out = self.experts() if kind == "experts" else self.dense(self.x)
        self._wait()
        middle = time.monotonic()
        out.sum().backward()
        self._wait()
        return Times(start, middle, time.monotonic(), time.process_time() - cpu)

    def traffic(self) -> tuple[dict[str, int], dict[str, float]]:
        """Return the bytes that one forward and backward sends to other ranks: counted, and by the plan."""
        plan = self._plan(self.moe.router(self.x)[0])
        before = Counter(exchange.bytes_sent)
        self.run("experts")
        out, back = (sum(counts) - counts[self.rank] for counts in (plan.sent, plan.received))
        shape = {"dim": self.s.dim, "itemsize": self.x.itemsize, "per_token": self.s.per_token}
        return dict(exchange.bytes_sent - before), dispatch_bytes(out, back, **shape, weight_itemsize=4)

    def _wait(self) -> None:
        if self.s.device == "cuda":
            torch.cuda.synchronize()
        if self.rank is not None:
            dist.barrier()

    def close(self) -> None:
        """Close nothing: there is no context."""


def compared(team: Team, settings: argparse.Namespace) -> Row:
    """Measure one degree.

    Args:
        team: The processes.
        settings: The command line.

    Returns:
        The row of the degree.
    """
    team.whole("prepare", settings)
    team.ranks("prepare", settings)
    kinds = "dense", "experts", "dense_model", "experts_model"
    times: dict[str, list[float]] = {kind: [] for kind in (*kinds, "ranks")}
    for _ in range(settings.rounds + 1):
        for kind in kinds:
            times[kind].append(span([team.whole("run", kind)]))
        times["ranks"].append(span(team.ranks("run", "experts")))
    pairs = zip(times["dense_model"][1:], times["experts_model"][1:], strict=True)
    ratios = [dense / experts for dense, experts in pairs]
    ms = {kind: round(1e3 * statistics.median(all_times[1:]), 2) for kind, all_times in times.items()}
    traffic = team.ranks("traffic")
    sent = sum(sum(counted.values()) for counted, _ in traffic)
    away = ranks_of_a_token(ExpertArgs(settings.experts, settings.per_token, 1), team.degree)
    return {
        "degree": team.degree,
        "dense_ms": ms["dense"],
        "experts_ms": ms["experts"],
        "over_dense": round(ms["experts"] / ms["dense"], 2),
        "model_tokens_a_second": round(1e3 * settings.tokens / ms["experts_model"]),
        "of_dense_model": round(statistics.median(ratios), 2),
        "of_dense_model_range": [round(min(ratios), 2), round(max(ratios), 2)],
        "ranks_ms": ms["ranks"],
        "bytes_sent": sent,
        "is_plan": all(counted == planned for counted, planned in traffic),
        "ranks_of_a_token": round(away, 2),
    }


def main() -> None:
    """Measure every degree and print a line of JSON for each."""
    settings = parser().parse_args()
    for degree in settings.degrees:
        if settings.experts % degree or settings.tokens % degree:
            raise SystemExit(f"--degrees {degree} must divide --experts {settings.experts} and --tokens")
        with Team(degree, Layer, Layer, settings.device) as team:
            print(json.dumps(compared(team, settings)), flush=True)


if __name__ == "__main__":
    main()
