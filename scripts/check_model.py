"""Run one step of your own model over ranks of this machine's CPU, and compare it with one process.

    python scripts/check_model.py ./Qwen2.5-0.5B --seq-len 96
    python scripts/check_model.py my_model.py:build_model --ranks 4 --method all_to_all

A folder has a config.json of Hugging Face. Its class is built small, in float64, with random weights: what may go wrong
depends on the code, not on the weights. A function is called on each rank and returns a module, which is called as
`model(tokens, positions)` if it is none of transformers. Exit code: 0 all is equal, 1 something differs or is refused,
2 an argument is wrong.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone

from trainer.commands.options import Parser, number
from trainer.config.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

_SMALL = {"num_hidden_layers": 2, "vocab_size": 512}
_LIMIT = timedelta(seconds=600)  # for a rank that waits


def parser() -> Parser:
    """Return the parser of the options."""
    described = Parser("check-model", __doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = described.add_argument
    add("model", help="a folder with config.json, or FILE.py:FUNCTION that returns a module")
    add("--ranks", type=number(int, 2), default=2, help="over which the sequence is cut (default: 2)")
    add("--seq-len", type=number(int, 4), default=64, help="tokens of a sequence (default: 64)")
    add(
        "--method",
        default="ring",
        choices=("ring", "all_gather", "all_to_all"),
        help="how K and V, or heads, are sent (default: ring)",
    )
    balancers = ("auto", "head_tail", "contiguous", "balanced")
    add("--load-balancer", default="auto", choices=balancers, help="who has which tokens (default: by method)")
    add("--attention", help="of transformers: sdpa, or context_parallel (default), which knows windows and sinks")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a value of the configuration, as JSON")
    add("--allow", action="append", default=[], metavar="MODULE", help="a class or module that you checked by hand")
    add("--tolerance", type=float, default=1e-5, help="largest relative error (default: 1e-5)")
    return described


def model_of(args: argparse.Namespace) -> "nn.Module":
    """Build the model, the same on every rank.

    Raises:
        ConfigError: there is no such folder, file or function, or transformers cannot build it.
    """
    import torch

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

    from trainer.integrations.calls import register_transformers_attention

    register_transformers_attention()
    try:
        config = AutoConfig.from_pretrained(folder, **_changes(folder, args))
        model = AutoModelForCausalLM.from_config(config)
        model.set_attn_implementation(args.attention or "context_parallel")
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the other ones know no float64
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"transformers cannot build {args.model}: {str(error).splitlines()[0]}") from None
    return model.double()


def _function(name: str) -> Callable[[], "nn.Module"]:
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
    """Return the values that make a configuration small, with a window that hides some of the tokens, and --set."""
    given = json.loads((folder / "config.json").read_text())
    changes = {key: min(most, given[key]) for key, most in _SMALL.items() if isinstance(given.get(key), int)}
    changes["initializer_range"] = 0.2  # with smaller weights attention matters little
    if given.get("layer_types"):
        kinds = list(dict.fromkeys(given["layer_types"]))  # a layer of each kind
        changes |= {"layer_types": kinds * (2 if len(kinds) == 1 else 1)}
        changes["num_hidden_layers"] = len(changes["layer_types"])
    if (given.get("sliding_window") or 0) >= args.seq_len:
        changes["sliding_window"] = 3 * args.seq_len // 4  # between a rank's part and the sequence
    for each in args.set:
        key, _, value = each.partition("=")
        try:
            changes[key] = json.loads(value)
        except ValueError:
            changes[key] = value
    return changes


def _vocabulary(model: "nn.Module") -> int:
    """Return the number of token ids: of the configuration, or rows of the first table of embeddings."""
    from torch import nn

    size = getattr(getattr(model, "config", None), "vocab_size", None)
    size = size or next((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if not size:
        raise ConfigError(f"{type(model).__name__} has neither config.vocab_size nor an nn.Embedding for token ids")
    return size


def _on_rank(rank: int, args: argparse.Namespace, folder: str) -> None:
    """Check the model on one of the ranks; rank 0 writes the table and the verdict."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from trainer.integrations.verification import check_model

    torch.set_num_threads(max((os.cpu_count() or 1) // args.ranks, 1))
    store = dist.FileStore(f"{folder}/store", args.ranks)
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks, store=store, timeout=_LIMIT)
    try:
        model = model_of(args)
        tokens = torch.randint(_vocabulary(model), (2, args.seq_len + 1), generator=torch.Generator().manual_seed(1))
        mesh = init_device_mesh("cpu", (args.ranks,), mesh_dim_names=("cp",))
        settings = {"method": args.method, "load_balancer": args.load_balancer, "allow_modules": args.allow}
        found = check_model(model, mesh, tokens, tolerance=args.tolerance, **settings)
        if rank == 0:
            Path(folder, "result").write_text(json.dumps([found.holds, str(found)]))
    except ConfigError as error:
        if rank == 0:
            Path(folder, "error").write_text(str(error))
    finally:
        dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    """Print the table, and return the exit code."""
    try:
        args = parser().parse_args(argv)
        if args.seq_len < 2 * args.ranks:
            raise ConfigError(f"--seq-len {args.seq_len} must be at least 2 tokens for each of --ranks {args.ranks}")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from torch import multiprocessing

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
