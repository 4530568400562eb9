"""Compare functions of torch on a sharded axis: `DomainTensor` and ShardTensor of NVIDIA PhysicsNeMo.

    pip install --target packages --no-deps nvidia-physicsnemo warp-lang nvtx jaxtyping treelib tensordict timm einops
    python scripts/compare_shard_tensor.py --packages packages --json rows.json

(The package needs some twenty others, which its error messages name.) Each case is one function of a float64 tensor
with a sharded axis, in uneven and in even shards. The output, the gradient of the input, and the gradients of weights
summed over the ranks are compared with one process, with random cotangents. A row says `exact` (relative errors below
1e-12), the largest error, or the exception. ShardTensor is made for GPUs: its exchange of shapes runs without CUDA
here, and its handlers of meshes, points and neighbourhood attention are left out.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone, installed or not

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longshard.domain import Domain, DomainTensor, gather, sized
from scripts.provenance import made_with

EXACT = 1e-12
ROWS = 18  # of the sharded axis, which most cases have as dimension 2


@dataclass(frozen=True)
class Case:
    """A function to compare.

    Attributes:
        run: Takes a tensor and the weights, and returns a tensor.
        weights: The shape of each weight; every rank has all weights.
        shape: The shape of the tensor.
        dim: The sharded dimension.
    """

    run: Callable[..., torch.Tensor]
    weights: Sequence[tuple[int, ...]] = ()
    shape: tuple[int, ...] = (2, 4, ROWS, 6)
    dim: int = 2


def _attention(x: torch.Tensor, causal: bool) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=causal)


def _norm_of_batch(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, None, None, w, training=True)


CASES: dict[str, Case] = {
    "relu": Case(F.relu),
    "x * weight": Case(lambda x, w: x * w, [(4, 1, 1)]),
    "convolution, 3 x 3": Case(lambda x, w: F.conv2d(x, w, padding=1), [(3, 4, 3, 3)]),
    "convolution, stride 2": Case(lambda x, w: F.conv2d(x, w, padding=1, stride=2), [(3, 4, 3, 3)]),
    "convolution, dilation 2": Case(lambda x, w: F.conv2d(x, w, padding=2, dilation=2), [(3, 4, 3, 3)]),
    "convolution, patches of 3": Case(lambda x, w: F.conv2d(x, w, stride=3), [(3, 4, 3, 3)]),
    "transposed convolution, stride 2": Case(lambda x, w: F.conv_transpose2d(x, w, stride=2), [(4, 3, 2, 2)]),
    "max pool": Case(lambda x: F.max_pool2d(x, 2)),
    "average pool": Case(lambda x: F.avg_pool2d(x, 2)),
    "overlapping max pool": Case(lambda x: F.max_pool2d(x, 3, stride=2, padding=1)),
    "adaptive average pool": Case(lambda x: F.adaptive_avg_pool2d(x, (5, 3))),
    "group norm": Case(lambda x, w: F.group_norm(x, 2, w), [(4,)]),
    "batch norm": Case(_norm_of_batch, [(4,)]),
    "instance norm": Case(F.instance_norm),
    "layer norm": Case(lambda x, w: F.layer_norm(x, (6,), w), [(6,)]),
    "interpolation, nearest": Case(lambda x: F.interpolate(x, scale_factor=2)),
    "interpolation, bilinear": Case(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    "pad with zeros": Case(lambda x: F.pad(x, (0, 0, 2, 1))),
    "circular pad": Case(lambda x: F.pad(x, (0, 0, 1, 1), mode="circular")),
    "attention": Case(lambda x: _attention(x, False)),
    "causal attention": Case(lambda x: _attention(x, True)),
    "linear": Case(F.linear, [(5, 6)]),
    "x @ weight over the shards": Case(lambda x, w: x.mT @ w, [(ROWS, 3)]),
    "softmax along the shards": Case(lambda x: x.softmax(2)),
    "cumsum along the shards": Case(lambda x: x.cumsum(2)),
    "sort along the shards": Case(lambda x: x.sort(2).values),
    "topk along the shards": Case(lambda x: x.topk(3, 2).values),
    "fft along the shards": Case(lambda x: torch.fft.rfft(x, dim=2).abs()),
    "mean": Case(lambda x: x.mean((2, 3))),
    "variance": Case(lambda x: x.var(2)),
    "maximum": Case(lambda x: x.amax(2)),
    "norm": Case(lambda x: torch.linalg.vector_norm(x, dim=2)),
    "x[:, :, 3:11]": Case(lambda x: x[:, :, 3:11]),
    "x[:, :, ::2]": Case(lambda x: x[:, :, ::2]),
    "cat along the shards": Case(lambda x: torch.cat((x, 2 * x), 2)),
    "flip": Case(lambda x: x.flip(2)),
    "roll": Case(lambda x: x.roll(3, 2)),
    "index_select": Case(lambda x: x.index_select(2, torch.tensor([17, 0, 5, 5]))),
    "flatten": Case(lambda x: x.flatten(1, 2)),
    "permute": Case(lambda x: x.permute(0, 2, 3, 1)),
    "pixel shuffle": Case(lambda x: F.pixel_shuffle(x, 2)),
}


def relative(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest relative error; inf where a shape differs.

    Args:
        results: Tensors of any shape.
        expected: The expected tensors, in the same order.
    """
    errors = [
        ((a - b).norm() / b.norm()).item() if a.shape == b.shape else float("inf")
        for a, b in zip(results, expected, strict=True)
    ]
    return max(errors)


class Ours:
    """Runs cases on a `DomainTensor`.

    Args:
        mesh: The ranks.
        sizes: Rows of each rank.
    """

    def __init__(self, mesh: DeviceMesh, sizes: Sequence[int]) -> None:
        self.mesh = mesh
        self.sizes = sizes

    def run(self, case: Case, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the whole output and all gradients of a case.

        Args:
            case: The case.
            x: The whole input, of any shape.
            weights: The weights.
        """
        domain = Domain.on(self.mesh, {case.dim: (self.mesh.mesh_dim_names[0], sized(self.sizes))})
        part = x.split(list(self.sizes), case.dim)[dist.get_rank()].clone().requires_grad_()
        weights = [w.clone().requires_grad_() for w in weights]
        y = case.run(DomainTensor(part, domain), *weights)
        is_sharded = isinstance(y, DomainTensor) and bool(y.domain.axes)
        whole = gather(y).local if is_sharded else y.local if isinstance(y, DomainTensor) else y
        cotangent = _cotangent(whole.shape)
        # Every rank computes the whole output from `gather`, so that each one's loss is the loss of all.
        dx, *dweights = torch.autograd.grad(whole, [part, *weights], cotangent / dist.get_world_size())
        for gradient in dweights:
            dist.all_reduce(gradient)
        return whole.detach(), gather(DomainTensor(dx, domain)).local, *dweights


_HANDLERS = (
    "custom_ops",
    *(
        f"shard_utils.{name}"
        for name in (
            *("attention_patches", "conv_patches", "index_ops", "linear_patches", "normalization_patches", "padding"),
            *("pooling_patches", "unary_ops", "unpooling_patches", "view_ops", "grad_ops"),
        )
    ),
)
"""All handlers of ShardTensor that need no packages for GPUs."""


def _shapes_of_ranks(
    shape: Sequence[int], _dim: int, group: dist.ProcessGroup, do_checks: bool = False
) -> tuple[torch.Size, ...]:
    """Return the shapes of all shards, as ShardTensor does, but without CUDA."""
    shapes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(shapes, tuple(shape), group=group)
    return tuple(map(torch.Size, shapes))


class Theirs:
    """Runs cases on a ShardTensor. Weights are replicated DTensors, as its `distribute_module` makes them.

    Args:
        mesh: The ranks.
        sizes: Rows of each rank.
        packages: The folder of nvidia-physicsnemo.
    """

    def __init__(self, mesh: DeviceMesh, sizes: Sequence[int], packages: Path) -> None:
        self.mesh = mesh
        self.sizes = sizes
        sys.path.insert(0, str(packages))
        import physicsnemo
        from physicsnemo.domain_parallel import ShardTensor

        self.name = f"ShardTensor {physicsnemo.__version__}"
        self._kind = ShardTensor
        spec = importlib.import_module("physicsnemo.domain_parallel._shard_tensor_spec")
        spec._gather_shard_shapes_for_dim = _shapes_of_ranks
        for module in _HANDLERS:  # importing registers them; the package imports them on GPUs only
            importlib.import_module(f"physicsnemo.domain_parallel.{module}")

    def run(self, case: Case, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the whole output and all gradients of a case.

        Args:
            case: The case.
            x: The whole input, of any shape.
            weights: The weights.
        """
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        parts = x.split(list(self.sizes), case.dim)
        shapes = {0: [tuple(part.shape) for part in parts]}
        part = parts[dist.get_rank()].clone()
        sharded = self._kind.from_local(part, self.mesh, [Shard(case.dim)], sharding_shapes=shapes).requires_grad_()
        weights = [distribute_tensor(w, self.mesh, [Replicate()]).requires_grad_() for w in weights]
        y = case.run(sharded, *weights)
        whole = y.full_tensor()
        gradients = torch.autograd.grad(whole, [sharded, *weights], _cotangent(whole.shape))
        return whole.detach(), *(gradient.full_tensor().detach() for gradient in gradients)


def _cotangent(shape: Sequence[int]) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def one_process(case: Case, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return output and gradients of the plain function.

    Args:
        case: The case.
        x: The input, of any shape.
        weights: The weights.
    """
    leaves = [t.clone().requires_grad_() for t in (x, *weights)]
    y = case.run(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, _cotangent(y.shape))


def verdict(side: Ours | Theirs, case: Case) -> str:
    """Return the worst outcome of a case over all ranks: "exact", the largest error, or an exception.

    Args:
        side: The side that runs the case.
        case: The case.
    """
    generator = torch.Generator().manual_seed(1)
    x, *weights = (torch.randn(s, dtype=torch.float64, generator=generator) for s in (case.shape, *case.weights))
    try:
        error = relative(side.run(case, x, weights), one_process(case, x, weights))
        words = ""
    except Exception as raised:
        error = float("nan")
        words = f"{type(raised).__name__}: {raised}".splitlines()[0][:160]
    outcomes: list[tuple[float, str]] = [(0.0, "")] * dist.get_world_size()
    dist.all_gather_object(outcomes, (error, words))
    raised = [words for _, words in outcomes if words]
    worst = max(error for error, _ in outcomes)
    return raised[0] if raised else "exact" if worst < EXACT else f"wrong: relative error {worst:.1e}"


def rank(names: Sequence[str], sizes: Sequence[int], packages: Path | None, say: Callable[[str], None]) -> None:
    """Run cases as one of the ranks that torchrun has started, and write a line of JSON for each case.

    Args:
        names: The names of the cases.
        sizes: Rows of each rank.
        packages: The folder of nvidia-physicsnemo; None for `DomainTensor` alone.
        say: Writes a line.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("h",))
    ours = Ours(mesh, sizes)
    theirs = Theirs(mesh, sizes, packages) if packages else None
    for name in names:
        row = {"case": name, "ours": verdict(ours, CASES[name])}
        if theirs is not None:
            say(json.dumps(row | {theirs.name: "the process ended"}))
            row |= {theirs.name: verdict(theirs, CASES[name])}
        say(json.dumps(row))
    dist.destroy_process_group()


def rows_of(sizes: Sequence[int], packages: Path | None) -> list[dict[str, str]]:
    """Run all cases on ranks. If a case ends the processes, new ranks continue with the next case.

    Args:
        sizes: Rows of each rank.
        packages: The folder of nvidia-physicsnemo; None for `DomainTensor` alone.

    Returns:
        A row for each case: the case, and the outcome of each side.
    """
    rows: dict[str, dict[str, str]] = {}
    while cases := [name for name in CASES if name not in rows]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "rows")
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(sizes)}"]
            options = ["--sizes", *map(str, sizes), *(["--packages", str(packages)] if packages else [])]
            work = [str(Path(__file__).resolve()), *options, "--rows", str(file), "--cases", *cases]
            done = subprocess.run([*command, *work], capture_output=True, text=True, check=False)
            lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        if not lines:
            raise SystemExit(f"no case ran; the ranks said:\n{done.stderr}")
        for row in lines:  # the last line of a case counts
            rows[row["case"]] = row
        print(f"{len(rows)} of {len(CASES)} cases", flush=True)
    return [*rows.values()]


def main(argv: list[str] | None = None) -> None:
    """Compare all cases, print the rows, and write them.

    Args:
        argv: The words of the command line; None for the words of this process.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packages", type=Path, help="folder of nvidia-physicsnemo; default: ours alone")
    parser.add_argument("--sizes", type=int, nargs="+", default=[7, 11], help="rows of each rank")
    parser.add_argument("--json", type=Path, help="file of the rows")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rows is not None:
        output = args.rows.open("a") if int(os.environ["RANK"]) == 0 else None
        say = partial(print, file=output, flush=True) if output else lambda _: None
        rank(args.cases, args.sizes, args.packages, say)
        return
    tables = {}
    for sizes in (args.sizes, [ROWS // len(args.sizes)] * len(args.sizes)):
        rows = rows_of(sizes, args.packages)
        for row in rows:
            print("  ".join(row.values()))
        words = f"shards of {' and '.join(map(str, sizes))} rows"
        for side in [key for key in rows[0] if key != "case"]:
            print(f"{words}, {side}: {sum(row[side] == 'exact' for row in rows)} of {len(rows)} exact")
        tables[words] = rows
    if args.json:
        head = made_with("scripts/compare_shard_tensor.py", argv, device="cpu")
        args.json.write_text(json.dumps(head | tables, indent=1) + "\n")


if __name__ == "__main__":
    main()
