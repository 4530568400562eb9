"""Run one step of your own model over ranks of this machine's CPU, and compare it with one process.

    python scripts/check_model.py ./Qwen2.5-0.5B --seq-len 96
    python scripts/check_model.py my_model.py:build_model --ranks 4 --method all_to_all

A folder has a config.json of Hugging Face. Its class is built small, in float64, with random weights, because an error
would depend on the code and not on the weights. A function is called on each rank and returns a module. If the module
is no model of transformers, it is called as `model(tokens, positions)`. Exit code: 0 all results are equal, 1 a result
differs or the model is refused, 2 an argument is wrong.

`check_model` does the same from Python, for a model that you build and call yourself.
"""

import argparse
import copy
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone

from longshard.context.planning.options import ContextParallelError
from longshard.context.regions import context_parallel
from longshard.integrations.calls import register_transformers_attention
from longshard.integrations.inspection import is_model, window_of
from longshard.integrations.interception import intercept_sdpa
from longshard.sharding.exchange import all_gather, all_reduce
from longshard.sharding.layout import AxisLayout
from trainer.commands.options import Parser, number
from trainer.config.errors import ConfigError

_WORST = 8  # most differing parameters that are named
_SMALL = {"num_hidden_layers": 2, "vocab_size": 512}
_LIMIT = timedelta(seconds=600)  # how long a rank waits
Call = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


# ---- the check


@dataclass(frozen=True)
class Row:
    """One comparison: a line of the table.

    Attributes:
        name: The compared quantity.
        result: The result of the comparison.
        detail: The numbers, or the reason.
    """

    name: str
    result: Literal["equal", "DIFFERS", "REFUSED", "not seen"]
    detail: str


@dataclass(frozen=True)
class Verification:
    """The comparisons of `check_model`."""

    rows: tuple[Row, ...]

    @property
    def holds(self) -> bool:
        """Whether every compared quantity equals the quantity of one process."""
        return all(row.result in ("equal", "not seen") for row in self.rows)

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        return "\n".join(f"{row.name:{width}}  {row.result:8}  {row.detail}" for row in self.rows)


def call_model(model: nn.Module, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the logits, (B, S, V), of a model of transformers, or of `model(tokens, positions)`.

    Args:
        model: The model.
        tokens: Token ids, (B, S), int64.
        positions: Positions of the tokens, (B, S), int64.
    """
    if not is_model(model):
        return model(tokens, positions)
    ones = torch.ones_like(tokens)
    return model(input_ids=tokens, position_ids=positions, attention_mask=ones, use_cache=False).logits


def check_model(
    model: nn.Module,
    mesh: DeviceMesh,
    tokens: torch.Tensor,
    *,
    call: Call = call_model,
    tolerance: float = 1e-5,
    method: str = "ring",
    load_balancer: str = "auto",
    allow_modules: Sequence[type | str] = (),
) -> Verification:
    """Compare logits, loss and every gradient of one step over the ranks of a mesh with one process. A collective.

    Copies of the model run, without dropout. On one process, `sdpa` or else `eager` replaces "context_parallel".

    Args:
        model: The model, with the same weights on every rank, best in float64.
        mesh: The ranks, a mesh of one dimension.
        tokens: Token ids, (B, S + 1), the same on every rank. The label of each token is the next token.
        call: Returns the logits, (B, S, V), of a model, tokens and positions.
        tolerance: Largest relative error of equal quantities.
        method: The method of context parallelism.
        load_balancer: The load balancer.
        allow_modules: Classes or names of modules that may mix tokens, because they were checked by hand.

    Returns:
        A row for each comparison. If the model cannot be context parallel, one row says why.
    """
    alone = _use_own_attention(copy.deepcopy(model).eval())
    spread = copy.deepcopy(model).eval()
    text, labels = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    positions = torch.arange(text.shape[1], device=text.device).expand_as(text).clone()
    count = labels.numel()
    whole, whole_loss = _step(alone, call, text, positions, labels, count)
    settings = {"method": method, "load_balancer": load_balancer, "buffers": [text, labels, positions]}
    settings |= {"buffer_seq_dims": [1] * 3, "intercept": intercept_sdpa(spread, allow_modules=allow_modules)}
    try:
        with context_parallel(mesh, **settings) as cp:
            logits, loss = _step(spread, call, text, positions, labels, count)
    except ContextParallelError as error:
        return Verification((Row("the model", "REFUSED", str(error)),))
    error, total = _over_all_ranks(logits, loss, whole, cp.layout, mesh)
    calls = f"{cp.live.calls} calls ran over {mesh.size()} ranks by {method}, {cp.live.options.balancer}"
    rows = (
        Row("attention", "equal", calls),
        _row("logits", error, tolerance, f"shape {tuple(whole.shape)}"),
        _row("loss", _relative(total, whole_loss), tolerance, f"{whole_loss.item():.6f} on one process"),
        *_gradients(spread, alone, mesh, tolerance),
        *_unseen(model, text.shape[1]),
    )
    return Verification(rows)


def _over_all_ranks(
    logits: torch.Tensor, loss: torch.Tensor, whole: torch.Tensor, layout: AxisLayout, mesh: DeviceMesh
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest relative error of the local logits, and the sum of the local losses, over all ranks."""
    local_indices = torch.from_numpy(layout.indices(mesh.get_local_rank())).to(whole.device)
    errors = all_gather(_relative(logits, whole[:, local_indices]).reshape(1), mesh)
    return errors.max(), all_reduce(loss.clone().reshape(1), mesh, "sum")


def _step(
    model: nn.Module, call: Call, text: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run forward and backward; return logits and loss without gradient."""
    logits = call(model, text, positions)
    loss = _loss(logits, labels, count)
    loss.backward()
    return logits.detach(), loss.detach()


def _gradients(spread: nn.Module, alone: nn.Module, mesh: DeviceMesh, tolerance: float) -> list[Row]:
    """Return rows: all gradients, the worst that differ, and parameters without a gradient."""
    errors = {}
    without = []
    wanted = {name: p.grad for name, p in alone.named_parameters()}
    floor = max((x.norm().item() for x in wanted.values() if x is not None), default=0.0) * 1e-12
    for name, p in spread.named_parameters():
        sums = all_reduce(torch.zeros_like(p) if p.grad is None else p.grad.clone(), mesh, "sum")
        if wanted[name] is None and not sums.any():
            without.append(name)
            continue
        one = torch.zeros_like(p) if wanted[name] is None else wanted[name]
        errors[name] = ((sums - one).norm() / one.norm().clamp(min=floor)).item()
    if not errors:
        return [Row("gradients", "DIFFERS", "no parameter has one")]
    worst = sorted(errors, key=errors.__getitem__, reverse=True)
    rows = [_row("gradients", errors[worst[0]], tolerance, f"the worst of {len(errors)}: {worst[0]}")]
    wrong = [name for name in worst if not errors[name] <= tolerance]
    rows += [_row(f"  {name}", errors[name], tolerance, "") for name in wrong[:_WORST]]
    if len(wrong) > _WORST:
        rows.append(Row("  others", "DIFFERS", f"{len(wrong) - _WORST} more differ"))
    if without:
        rows.append(Row("no gradient", "not seen", f"{len(without)} parameters had none, among them {without[0]}"))
    return rows


def _unseen(model: nn.Module, seq_len: int) -> list[Row]:
    """Return rows for properties that this step could not check."""
    rows = []
    windows = [window_of(module.config) for module in model.modules() if is_model(module)]
    longest = max((window for window in windows if window), default=0)
    if longest >= seq_len:
        rows.append(
            Row("windows", "not seen", f"a window of {longest} hides nothing of {seq_len} tokens; give more tokens")
        )
    if dropouts := sum(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        rows.append(Row("dropout", "not seen", f"{dropouts} modules, switched off here; each rank draws its own"))
    return rows


def _row(name: str, error: torch.Tensor | float, tolerance: float, detail: str) -> Row:
    return Row(name, "equal" if error <= tolerance else "DIFFERS", f"{float(error):.1e}  {detail}".rstrip())


def _relative(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a - b).norm() / b.norm()


def _use_own_attention(model: nn.Module) -> nn.Module:
    """Replace attention of transformers that does not run on one process."""
    if is_model(model) and (model.config._attn_implementation or "") not in ("sdpa", "eager"):
        try:
            model.set_attn_implementation("sdpa")
        except ValueError:
            model.set_attn_implementation("eager")
    return model


def _loss(logits: torch.Tensor, labels: torch.Tensor, count: int) -> torch.Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count


# ---- the command


def parser() -> Parser:
    """Return the parser of the options."""
    described = Parser("check-model", __doc__)
    add = described.add_argument
    add("model", help="a folder with config.json, or FILE.py:FUNCTION that returns a module")
    add("--ranks", type=number(int, 2), default=2, help="ranks that divide the sequence (default: 2)")
    add("--seq-len", type=number(int, 4), default=64, help="tokens of a sequence (default: 64)")
    add(
        "--method",
        default="ring",
        choices=("ring", "all_gather", "all_to_all"),
        help="how K and V, or heads, are sent (default: ring)",
    )
    balancers = ("auto", "head_tail", "contiguous", "balanced")
    add("--load-balancer", default="auto", choices=balancers, help="which rank owns which tokens (default: by method)")
    add("--attention", help="of transformers: sdpa, or context_parallel (default), which knows windows and sinks")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a value of the configuration, as JSON")
    add("--allow", action="append", default=[], metavar="MODULE", help="a class or module that you checked by hand")
    add("--tolerance", type=float, default=1e-5, help="largest relative error (default: 1e-5)")
    return described


def model_of(args: argparse.Namespace) -> nn.Module:
    """Build the model, the same on every rank.

    Args:
        args: The options of the command line.

    Returns:
        The model, in float64.

    Raises:
        ConfigError: The folder, file or function does not exist, or transformers cannot build the model.
    """
    torch.manual_seed(0)
    if ".py:" in args.model:
        return _function(args.model)().double()
    folder = Path(args.model)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{args.model} has no config.json; give a folder of Hugging Face, such as one of `hf download`, or "
            "FILE.py:FUNCTION"
        )
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoConfig, AutoModelForCausalLM

    register_transformers_attention()
    try:
        config = AutoConfig.from_pretrained(folder, **_changes(folder, args))
        model = AutoModelForCausalLM.from_config(config)
        model.set_attn_implementation(args.attention or "context_parallel")
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the others do not support float64
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"transformers cannot build {args.model}: {str(error).splitlines()[0]}") from None
    return model.double()


def _function(name: str) -> Callable[[], nn.Module]:
    file, _, function = name.rpartition(":")
    if not Path(file).is_file():
        raise ConfigError(f"there is no file {file}; give FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, function, None)):
        raise ConfigError(f"{file} has no function {function!r}; name one that returns a module")
    return getattr(module, function)


def _changes(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of --set, and values that make a configuration small, with windows below the length."""
    config = json.loads((folder / "config.json").read_text())
    changes = {key: min(most, config[key]) for key, most in _SMALL.items() if isinstance(config.get(key), int)}
    changes["initializer_range"] = 0.2  # with smaller weights attention matters little
    if config.get("layer_types"):
        kinds = list(dict.fromkeys(config["layer_types"]))  # a layer of each kind
        changes |= {"layer_types": kinds * (2 if len(kinds) == 1 else 1)}
        changes["num_hidden_layers"] = len(changes["layer_types"])
    if (config.get("sliding_window") or 0) >= args.seq_len:
        changes["sliding_window"] = 3 * args.seq_len // 4  # longer than a shard, shorter than the sequence
    for each in args.set:
        key, _, value = each.partition("=")
        try:
            changes[key] = json.loads(value)
        except ValueError:
            changes[key] = value
    return changes


def _vocabulary(model: nn.Module) -> int:
    """Return the number of token ids: by the configuration, or by the first table of embeddings."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    size = size or next((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if not size:
        raise ConfigError(f"{type(model).__name__} has neither config.vocab_size nor an nn.Embedding for token ids")
    return size


def _on_rank(rank: int, args: argparse.Namespace, folder: str) -> None:
    """Check the model on one rank; rank 0 writes the table and the verdict, or the error."""
    torch.set_num_threads(max((os.cpu_count() or 1) // args.ranks, 1))
    store = dist.FileStore(f"{folder}/store", args.ranks)
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks, store=store, timeout=_LIMIT)
    try:
        model = model_of(args)
        tokens = torch.randint(_vocabulary(model), (2, args.seq_len + 1), generator=torch.Generator().manual_seed(1))
        mesh = init_device_mesh("cpu", (args.ranks,), mesh_dim_names=("cp",))
        settings = {"method": args.method, "load_balancer": args.load_balancer, "allow_modules": args.allow}
        verification = check_model(model, mesh, tokens, tolerance=args.tolerance, **settings)
        if rank == 0:
            Path(folder, "result").write_text(json.dumps([verification.holds, str(verification)]))
    except ConfigError as error:
        if rank == 0:
            Path(folder, "error").write_text(str(error))
    finally:
        dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    """Check a model, and print the table.

    Args:
        argv: The words of the command line; None for the words of this process.

    Returns:
        The exit code.
    """
    try:
        args = parser().parse_args(argv)
        if args.seq_len < 2 * args.ranks:
            raise ConfigError(f"--seq-len {args.seq_len} must be at least 2 tokens for each of --ranks {args.ranks}")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        try:
            # A fork does not import the program again, which a script without a guard would start again.
            multiprocessing.start_processes(_on_rank, (args, folder), args.ranks, start_method="fork")
        except multiprocessing.ProcessRaisedException as error:
            print(f"error: the model failed\n{error}", file=sys.stderr)
            return 1
        if (wrong := Path(folder, "error")).exists():
            print(f"error: {wrong.read_text()}", file=sys.stderr)
            return 2
        holds, table = json.loads(Path(folder, "result").read_text())
    print(f"{args.model}: one step over {args.ranks} ranks against one process, {args.seq_len} tokens, float64")
    print(table)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
