"""Where the time of a step goes: the parts of a block, projection to logits, loss and optimizer; eager and compiled.

    python scripts/benchmarks/block_parts.py --rows 4 --seq-len 512 --json result.json
    python scripts/benchmarks/block_parts.py --device cuda --flavor 8B --layers 4 --seq-len 8192

Each part runs alone on random numbers: its forward, then forward and backward with the gradients of its inputs and
weights. All parts take turns, eager and compiled. Each time is the median over the rounds. A share is (time of forward
and backward) * (times in a step) / (the sum of this product over the parts). The rows `block` and `step` show a whole
block and a whole step, for comparison with the sum. Embedding, residual sums and gradient norm are no part. The trainer
compiles whole blocks, which may fuse more than their parts. Settings of the trainer may follow.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not

import torch
from torch import nn

from scripts.benchmarks.train import check, common_parser, described, settled_work
from scripts.benchmarks.train_loops import Bare, Clock, Row, Work
from trainer.components.loss import token_losses
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.models.rotary import freqs_cis_at
from trainer.transforms.compile import compiled_loss

Outputs = torch.Tensor | tuple[torch.Tensor, ...]
_WIDTHS = {"part": 18, "times": 5, "forward_ms": 10, "forward_backward_ms": 19, "share": 6}


@dataclass(frozen=True)
class Part:
    """A function of some inputs that is timed.

    Attributes:
        name: Name of the part.
        times: How often a step runs the part; 0 if other parts contain it.
        function: The function.
        inputs: Its inputs.
        modules: The modules whose weights it uses.
    """

    name: str
    times: int
    function: Callable[..., Outputs]
    inputs: tuple[torch.Tensor, ...]
    modules: tuple[nn.Module, ...] = ()

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The tensors whose gradients the backward computes."""
        return [*self.inputs, *(p for module in self.modules for p in module.parameters())]

    def calls(self, function: Callable[..., Outputs]) -> dict[str, Callable[[], object]]:
        """Return the functions to time, by column.

        Args:
            function: The part's function, eager or compiled.
        """

        def forward() -> tuple[torch.Tensor, ...]:
            outputs = function(*self.inputs)
            return outputs if isinstance(outputs, tuple) else (outputs,)

        gradients = [torch.ones_like(x) for x in forward()]
        return {
            "forward_ms": forward,
            "forward_backward_ms": lambda: torch.autograd.grad(forward(), self.leaves, gradients),
        }


def parts(model: nn.Module, work: Work) -> list[Part]:
    """Return the parts of a step, in the order in which they run. For shapes see `Attention.forward`.

    Args:
        model: The decoder.
        work: The configuration, the device and the rounds to measure.
    """
    shape = work.shape()
    training = work.config.training
    block = next(iter(model.layers.values()))
    attention = block.attention
    layers = shape.n_layers
    positions = torch.arange(training.seq_len, device=work.device)
    table = freqs_cis_at(positions, model.frequencies, shape.rope_scaling, model.rotary_dtype)

    def tensor(*sizes: int) -> torch.Tensor:
        sizes = training.local_batch_size, training.seq_len, *sizes
        return torch.randn(sizes, dtype=work.compute_dtype, device=work.device, requires_grad=True)

    def rotary(q: torch.Tensor, k: torch.Tensor) -> Outputs:
        return attention.rotate(q, table), attention.rotate(k, table)

    def inner(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Outputs:
        return attention.inner_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    labels = torch.randint(shape.vocab_size, (training.local_batch_size, training.seq_len), device=work.device)
    projections = attention.wq, attention.wk, attention.wv
    x = tensor(shape.dim)
    q = tensor(shape.n_heads, shape.head_dim)
    k = tensor(shape.n_kv_heads, shape.head_dim)
    v = tensor(shape.n_kv_heads, shape.head_dim)
    return [
        Part("norm", 2 * layers + 1, lambda x: block.ffn_norm(x), (x,), (block.ffn_norm,)),
        Part("q/k/v projection", layers, lambda x: tuple(w(x) for w in projections), (x,), projections),
        Part("rotary", layers, rotary, (q, k)),
        Part("inner attention", layers, inner, (q, k, v)),
        Part("output projection", layers, lambda out: attention.wo(out.flatten(2)), (q,), (attention.wo,)),
        Part("feed-forward", layers, lambda x: block.feed_forward(x), (x,), (block.feed_forward,)),
        Part("logits", 1, lambda x: model.output(x), (x,), (model.output,)),
        Part("loss", 1, lambda logits: token_losses(logits, labels), (tensor(shape.vocab_size),)),
        Part("block", 0, lambda x: block(x, table), (x,), (block,)),
    ]


def measured(work: Work, compiled: Callable[[Callable[..., Outputs]], Callable[..., Outputs]]) -> list[Row]:
    """Time all parts in turn, after one call of each that is not timed.

    Args:
        work: The configuration, the device and the rounds to measure.
        compiled: Compiles a function.

    Returns:
        A row for each part, with times in milliseconds.
    """
    bare = Bare(work)
    bare.step()  # creates state and gradients for the optimizer
    clock = Clock(work.device)
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    step_parts = parts(bare.working, work)
    for part in step_parts:
        for prefix, function in (("", part.function), ("compiled_", compiled(part.function))):
            calls |= {(part.name, prefix + column): call for column, call in part.calls(function).items()}
    calls["optimizer", "forward_backward_ms"] = bare.optimizer.step
    calls["step", "forward_backward_ms"] = bare.step
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for call in calls.values():
        call()
    for _ in range(work.rounds):
        for key, call in calls.items():
            clock.start()
            for _ in range(work.steps):
                call()
            times[key].append(1e3 * clock.read().seconds / work.steps)
    rows: list[Row] = [{"part": part.name, "times": part.times} for part in step_parts]
    rows[-1:-1] = [{"part": "optimizer", "times": 1}]
    rows.append({"part": "step", "times": 0})
    for row in rows:
        row |= {name: statistics.median(values) for (part, name), values in times.items() if part == row["part"]}
    return shared(rows)


def shared(rows: list[Row]) -> list[Row]:
    """Add to each row the share of its part in a step, and round. The optimizer is never compiled.

    Args:
        rows: A row for each part.

    Returns:
        The rounded rows.
    """
    for prefix in ("", "compiled_"):
        spent = [row["times"] * row.get(f"{prefix}forward_backward_ms", row["forward_backward_ms"]) for row in rows]
        for row, time in zip(rows, spent, strict=True):
            if row["times"]:
                row[f"{prefix}share"] = round(time / sum(spent), 4)
    return [{key: round(x, 4) if isinstance(x, float) else x for key, x in row.items()} for row in rows]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    about = common_parser(__doc__)
    about.add_argument(
        "--backend",
        choices=("inductor", "aot_eager", "eager"),
        default="inductor",
        help="compiler back end of the compiled parts",
    )
    return about


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write the result to `--json`.

    Args:
        argv: The command line. None: the process's own.

    Returns:
        The exit code.
    """
    argv = sys.argv[1:] if argv is None else argv
    args, overrides = parser().parse_known_args(argv)
    try:
        work, base = settled_work(args, overrides)
        config = parse_command_line([*base, "--compile.enable", f"--compile.backend={args.backend}"]).config
        check(config, work)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    options = Work(config, work.device, work.steps, work.rounds).job.compilation
    result = described(work, argv, "scripts/benchmarks/block_parts.py")
    rows = measured(work, lambda function: compiled_loss(function, options))
    columns = [*_WIDTHS, *(f"compiled_{name}" for name in list(_WIDTHS)[2:])]
    print(*(f"{column:>{max(len(column), _WIDTHS.get(column, 0))}}" for column in columns))
    for row in rows:
        print(*(f"{row.get(column, '-'):>{max(len(column), _WIDTHS.get(column, 0))}}" for column in columns))
    if args.json is not None:
        args.json.write_text(json.dumps(result | {"results": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
