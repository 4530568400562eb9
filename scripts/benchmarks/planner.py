"""Published runs of other programs beside the planner's prediction for the same settings, and the records of GPUs.

python scripts/benchmarks/planner.py --json docs/measurements/planner.json    # trace each run, then print the tables
python scripts/benchmarks/planner.py --read docs/measurements/planner.json    # fit the records again and print

The runs stand in docs/measurements/published_runs.csv. Memory is not fitted. The shares of a GPU's peaks are fitted to
the times of every second run of this GPU, and tested on the others. Other programs are other code: what they keep for
the backward, gather or reserve differs from what this trainer does, so that differences are theirs and ours.
"""

import argparse
import csv
import json
import math
import statistics
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not

from lct_planner.estimate import Estimate, bubble, estimate
from lct_planner.profile import Profile
from lct_planner.timing import Device, device, step_time
from lct_planner.worker import Worker
from scripts.provenance import made_with
from trainer.config.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "docs" / "measurements" / "published_runs.csv"
FITTED = ("products", "float8", "attention", "memory", "fused", "link", "network")
_SHAPE = ("layers", "dim", "heads", "kv_heads", "ffn", "vocab")


def config_json(sizes: dict[str, int]) -> dict[str, Any]:
    """Return what the file of that name says of a Llama with these sizes, see `_SHAPE`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": sizes["dim"],
        "intermediate_size": sizes["ffn"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "vocab_size": sizes["vocab"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }


def settings(run: dict[str, str], folder: Path) -> list[str]:
    """Return the command line of a run. Its model's sizes are written into a folder."""
    shape = folder / "-".join(run[key] for key in _SHAPE)
    shape.mkdir(exist_ok=True)
    config = config_json({key: int(run[key]) for key in _SHAPE})
    (shape / "config.json").write_text(json.dumps(config))
    p, cp, pp = "--parallelism.", int(run["cp"]), int(run["pp"])
    arguments = [
        "--job.config_file=llama3_8b",
        f"--model.flavor={shape}",
        f"--training.seq_len={run['seq_len']}",
        f"--training.global_batch_size={run['global_batch']}",
        f"--training.local_batch_size={run['micro_batch']}",
        *([] if _is_of_megatron(run) else ["--training.loss_chunk_tokens=0"]),  # its loss is one kernel
        f"{p}data_parallel_shard_degree=-1",
        f"{p}context_parallel_degree={cp}",
        f"{p}tensor_parallel_degree={run['tp']}",
        f"{p}pipeline_parallel_degree={pp}",
        "--compile.enable" if run["compile"] == "1" else "--compile.no-enable",
    ]
    heads = [f"{p}context_parallel_method=all_to_all"]
    rows = [f"{p}context_parallel_method=ring", f"{p}context_parallel_load_balancer=head_tail"]
    arguments += (heads if _is_of_megatron(run) else rows) if cp > 1 else []
    if pp > 1:
        arguments += [f"{p}pipeline_parallel_schedule={run['schedule']}"]
        if _is_of_megatron(run):  # one sequence in each of four
            arguments += ["--training.local_batch_size=4"]
        else:
            arguments += [f"{p}pipeline_parallel_microbatch_size={int(run['micro_batch']) // pp}"]
    mode = {"full": "full", "none": "none"}.get(run["ac"], "selective")
    arguments += [f"--activation_checkpoint.mode={mode}"]
    arguments += ["--activation_checkpoint.selective_ac_option=op"] if mode == "selective" else []
    if "Kempner" in run["source"]:  # which stores weights and the optimizer's state in bfloat16
        arguments += ["--training.dtype=bfloat16"]
        arguments += [f"{p}disable_loss_parallel"] if run["tp"] != "1" else []  # whole logits on every rank
    return arguments


def _is_of_megatron(run: dict[str, str]) -> bool:
    return "SimuMax" in run["source"]


def record_of(run: dict[str, str]) -> Device:
    """Return the record of a run's GPU."""
    found = device(next(name for name in ("h200", "b200", "h100") if name.upper() in run["gpu"]))
    found = replace(found, bandwidth=2.0e12) if "HBM2e" in run["gpu"] else found
    return replace(found, node=4 if "Kempner" in run["source"] else 8)


def traced(runs: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Trace each run; return its predictions, or why there is none."""
    found, seen = [], {}
    with tempfile.TemporaryDirectory() as folder, Worker(has_shim=True) as worker:
        for run in runs:
            arguments = settings(run, Path(folder))
            key = (*arguments, run["gpus"])
            try:
                if key not in seen:
                    seen[key] = of_run(estimate(worker, arguments, int(run["gpus"]), record_of(run)))
                found.append(seen[key])
            except ConfigError as error:
                found.append({"error": str(error)})
            print(
                run["model"], run["seq_len"], run["gpus"], found[-1].get("error", "traced"), file=sys.stderr, flush=True
            )
    return found


def of_run(answer: Estimate) -> dict[str, Any]:
    tokens = answer.job.sequences_per_step * answer.job.positions / answer.job.degrees.world_size
    plain = asdict(replace(answer.profile, live={}, at={}, curve=[]))
    return {
        "allocated": answer.profile.peak,
        "reserved": answer.reserved,
        "purposes": answer.profile.live[answer.profile.peak_place],
        "profile": plain,
        "bubble": bubble(answer.job),
        "tokens": tokens,
    }


def seconds(run: dict[str, str], found: dict[str, Any], on: Device, efficiency: dict[str, float]) -> float:
    """Return the predicted time of a step."""
    profile = Profile(**found["profile"])
    work = {part: dict(amounts) for part, amounts in profile.work.items()}
    for amounts in work.values():  # the other program's kernels of attention are not known
        for name in [x for x in amounts if x.startswith(("attention_", "tails_"))]:
            amount, direction = amounts.pop(name), name.partition(" ")[0]
            if direction.startswith("attention_"):
                amounts[direction] = amounts.get(direction, 0.0) + amount
    for amounts in work.values() if "float8" in run["precision"] else ():  # traced in bfloat16
        amounts["float8"] = amounts.pop("products", 0.0)
    profile = replace(profile, work=work)
    if run["async_tp"] == "1":  # sent while products compute, as FSDP's messages are
        profile = replace(profile, messages={k.replace(" tp ", " fsdp "): x for k, x in profile.messages.items()})
    both = {"attention_forward": efficiency["attention"], "attention_backward": 0.8 * efficiency["attention"]}
    on = replace(on, efficiency={**on.efficiency, **efficiency, **both})
    return step_time(profile, on, found["bubble"], compiled=run["compile"] == "1").seconds


def fitted(rows: list[tuple[dict[str, str], dict[str, Any]]]) -> dict[str, float]:
    """Return the shares of the peaks that explain the times of these runs, near to what is known of kernels."""
    from scipy.optimize import minimize  # a machine that only runs a benchmark may lack it

    begin = {
        "products": 0.7,
        "float8": 0.5,
        "attention": 0.55,
        "memory": 0.8,
        "fused": 0.5,
        "link": 0.7,
        "network": 0.6,
    }
    start = [math.log(begin[name]) for name in FITTED]

    def loss(x: list[float]) -> float:
        efficiency = {name: math.exp(value) for name, value in zip(FITTED, x, strict=True)}
        errors = [
            math.log(
                seconds(run, found, record_of(run), efficiency) * float(run["tokens_per_s_per_gpu"]) / found["tokens"]
            )
            for run, found in rows
        ]
        near = sum((a - b) ** 2 for a, b in zip(x, start, strict=True))
        return sum(error**2 for error in errors) / len(errors) + 0.002 * near

    found = minimize(loss, start, method="Nelder-Mead", options={"maxiter": 4000, "xatol": 1e-4, "fatol": 1e-8})
    return {name: round(min(math.exp(value), 1.0), 3) for name, value in zip(FITTED, found.x, strict=True)}


def tables(runs: list[dict[str, str]], found: list[dict[str, Any]]) -> None:
    """Print the tables."""
    rows = [(run, answer) for run, answer in zip(runs, found, strict=True) if "error" not in answer]
    efficiency = {}
    for gpu in ("H100", "H200"):
        of_gpu = [row for row in rows if gpu in row[0]["gpu"] and row[0]["tokens_per_s_per_gpu"]]
        efficiency[gpu] = fitted(of_gpu[::2])
        print(f"{gpu}: {efficiency[gpu]}")
        for half, part in (("fitted", of_gpu[::2]), ("tested", of_gpu[1::2])):
            sizes = sorted(abs(error_of_time(*row, efficiency[gpu])) for row in part)
            near = sum(size <= 0.2 for size in sizes) / len(sizes)
            median = statistics.median(sizes)
            print(f"  {half}: {len(sizes)} runs, median error {median:.1%}, {near:.0%} within 20 %")
    head = ["model", "GPUs", "tokens", "parallel", "recomputed", "compiled", "precision"]
    head += ["published memory", "predicted", "", "published tok/s", "predicted", ""]
    print("\n| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    errors: dict[str, list[float]] = {"reserved": [], "allocated": []}
    for run, answer in zip(runs, found, strict=True):
        degrees = ", ".join(f"{key} {run[key]}" for key in ("tp", "cp", "pp") if run[key] not in ("", "1"))
        head = [*(run[key] for key in ("model", "gpus", "seq_len")), degrees]
        head += [run[key] for key in ("ac", "compile", "precision")]
        if "error" in answer:
            print("| " + " | ".join([*head, answer["error"], *[""] * 5]) + " |")
            continue
        unit = 1e9 if run["unit"] == "GB" else 2**30
        kind, size = "reserved", answer["reserved"]
        if _is_of_megatron(run):
            kind, size = "allocated", as_megatron(run, answer)
        memory = ["", f"{size / unit:.1f}", ""]
        if run["memory"]:
            error = size / unit / float(run["memory"]) - 1
            errors[kind].append(abs(error))
            memory[0], memory[2] = run["memory"], f"{error:+.0%}"
        speed = ["", "", ""]
        gpu = next((name for name in efficiency if name in run["gpu"]), None)
        if gpu is not None:
            error = error_of_time(run, answer, efficiency[gpu])
            published = float(run["tokens_per_s_per_gpu"])
            speed = [run["tokens_per_s_per_gpu"], f"{published * (1 + error):,.0f}", f"{error:+.0%}"]
        print("| " + " | ".join([*head, *memory, *speed]) + " |")
    print()
    for kind, sizes in errors.items():
        print(f"{kind} memory: {len(sizes)} runs, median error {statistics.median(sizes):.1%}")


def as_megatron(run: dict[str, str], answer: dict[str, Any]) -> float:
    """Return the bytes alive at the peak, as Megatron keeps states and inputs.

    Megatron keeps whole weights in bfloat16 and their gradients in float32 on each rank, and divides the 12 bytes a
    weight of the optimizer; here all is divided, and the weights of a layer or two are gathered. With TP it keeps a
    rank's own rows of the inputs of attention and feed-forward, and gathers all again in the backward. Its products
    that add to the gradients in float32 return an empty gradient in bfloat16: at the peak, that of the output's weight.
    """
    purposes, ranks = answer["purposes"], int(run["dp_shard"]) * int(run["cp"])
    ours = sum(purposes.get(name, 0.0) for name in ("parameters", "gradients", "optimizer", "gathered", "reduced"))
    weights = purposes["parameters"] / 4 * ranks
    tp, tokens = int(run["tp"]), int(run["micro_batch"]) * int(run["seq_len"]) // int(run["cp"])
    rows = 2 * int(run["layers"]) * tokens * int(run["dim"]) * 2 * (1 - 1 / tp)
    empty = 2 * int(run["vocab"]) * int(run["dim"]) / tp
    return answer["allocated"] - ours + weights * (2 + 4 + 12 / ranks) - rows + empty


def error_of_time(run: dict[str, str], answer: dict[str, Any], efficiency: dict[str, float]) -> float:
    """Return by how much the predicted tokens a second are more than the published ones."""
    predicted = answer["tokens"] / seconds(run, answer, record_of(run), efficiency)
    return predicted / float(run["tokens_per_s_per_gpu"]) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write what is traced")
    parser.add_argument("--read", type=Path, help="what was traced before")
    parser.add_argument("--only", default="", help="a part of the names of models")
    args = parser.parse_args()
    runs = [run for run in csv.DictReader(RUNS.open()) if args.only in run["model"]]
    found = json.loads(args.read.read_text())["runs"] if args.read else traced(runs)
    if args.json:
        head = made_with("scripts/benchmarks/planner.py", sys.argv[1:], device="none")
        args.json.write_text(json.dumps(head | {"runs": found}))
    tables(runs, found)


if __name__ == "__main__":
    main()
