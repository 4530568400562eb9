"""Published runs of other programs, and the planner's prediction for the same settings; fits the records of GPUs.

python scripts/benchmarks/planner.py --json docs/measurements/planner.json    # trace each run, then print the tables
python scripts/benchmarks/planner.py --read docs/measurements/planner.json    # fit the records again and print

docs/measurements/published_runs.csv has the runs. Memory is not fitted. The shares of a GPU's peaks are fitted to the
times of every second run on this GPU, and tested on the other runs. Other programs keep, gather and reserve other
tensors than this trainer, so differences come from their code as well as from the planner.
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
    """Return the content of a Llama's `config.json`.

    Args:
        sizes: Sizes of the model by the names in `_SHAPE`.
    """
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
    """Return the command line of a run; write the model's sizes into a folder.

    Args:
        run: A row of the published runs.
        folder: Folder for the model's `config.json`.
    """
    shape = folder / "-".join(run[key] for key in _SHAPE)
    shape.mkdir(exist_ok=True)
    config = config_json({key: int(run[key]) for key in _SHAPE})
    (shape / "config.json").write_text(json.dumps(config))
    p = "--parallelism."
    cp = int(run["cp"])
    pp = int(run["pp"])
    arguments = [
        "--job.config_file=llama3_8b",
        f"--model.flavor={shape}",
        f"--training.seq_len={run['seq_len']}",
        f"--training.global_batch_size={run['global_batch']}",
        f"--training.local_batch_size={run['micro_batch']}",
        *([] if _is_of_megatron(run) else ["--training.loss_chunk_tokens=0"]),  # Megatron's loss is one kernel
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
        if _is_of_megatron(run):  # four micro-batches of one sequence
            arguments += ["--training.local_batch_size=4"]
        else:
            arguments += [f"{p}pipeline_parallel_microbatch_size={int(run['micro_batch']) // pp}"]
    mode = {"full": "full", "none": "none"}.get(run["ac"], "selective")
    arguments += [f"--activation_checkpoint.mode={mode}"]
    arguments += ["--activation_checkpoint.selective_ac_option=op"] if mode == "selective" else []
    if "Kempner" in run["source"]:  # it stores weights and the optimizer's state in bfloat16
        arguments += ["--training.dtype=bfloat16"]
        arguments += [f"{p}disable_loss_parallel"] if run["tp"] != "1" else []  # whole logits on every rank
    return arguments


def _is_of_megatron(run: dict[str, str]) -> bool:
    return "SimuMax" in run["source"]


def record_of(run: dict[str, str]) -> Device:
    """Return the record of the GPU of a run.

    Args:
        run: A row of the published runs.
    """
    record = device(next(name for name in ("h200", "b200", "h100") if name.upper() in run["gpu"]))
    record = replace(record, bandwidth=2.0e12) if "HBM2e" in run["gpu"] else record
    return replace(record, node=4 if "Kempner" in run["source"] else 8)


def traced(runs: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Trace each run.

    Args:
        runs: Rows of the published runs.

    Returns:
        The predictions of each run, or the error that says why there is none.
    """
    results = []
    seen = {}
    with tempfile.TemporaryDirectory() as folder, Worker(has_shim=True) as worker:
        for run in runs:
            arguments = settings(run, Path(folder))
            key = (*arguments, run["gpus"])
            try:
                if key not in seen:
                    seen[key] = prediction_of(estimate(worker, arguments, int(run["gpus"]), record_of(run)))
                results.append(seen[key])
            except ConfigError as error:
                results.append({"error": str(error)})
            outcome = results[-1].get("error", "traced")
            print(run["model"], run["seq_len"], run["gpus"], outcome, file=sys.stderr, flush=True)
    return results


def prediction_of(answer: Estimate) -> dict[str, Any]:
    """Return the parts of an estimate that the tables need, as JSON.

    Args:
        answer: The estimate of a run.
    """
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


def seconds(run: dict[str, str], prediction: dict[str, Any], on: Device, efficiency: dict[str, float]) -> float:
    """Return the predicted time of a step in seconds.

    Args:
        run: A row of the published runs.
        prediction: The run's prediction.
        on: Record of the GPU.
        efficiency: Shares of the GPU's peaks, by the names in `FITTED`.
    """
    profile = Profile(**prediction["profile"])
    work = {part: dict(amounts) for part, amounts in profile.work.items()}
    for amounts in work.values():  # the attention kernels of the other program are unknown
        for name in [x for x in amounts if x.startswith(("attention_", "tails_"))]:
            amount = amounts.pop(name)
            direction = name.partition(" ")[0]
            if direction.startswith("attention_"):
                amounts[direction] = amounts.get(direction, 0.0) + amount
    for amounts in work.values() if "float8" in run["precision"] else ():  # traced in bfloat16
        amounts["float8"] = amounts.pop("products", 0.0)
    profile = replace(profile, work=work)
    if run["async_tp"] == "1":  # sent during matrix products, as FSDP's messages are
        profile = replace(profile, messages={k.replace(" tp ", " fsdp "): x for k, x in profile.messages.items()})
    both = {"attention_forward": efficiency["attention"], "attention_backward": 0.8 * efficiency["attention"]}
    on = replace(on, efficiency={**on.efficiency, **efficiency, **both})
    return step_time(profile, on, prediction["bubble"], compiled=run["compile"] == "1").seconds


def fitted(rows: list[tuple[dict[str, str], dict[str, Any]]]) -> dict[str, float]:
    """Return the shares of the peaks that explain the times of these runs, close to known values of kernels.

    Args:
        rows: Published runs and their predictions.
    """
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
        errors = []
        for run, prediction in rows:
            time = seconds(run, prediction, record_of(run), efficiency)
            errors.append(math.log(time * float(run["tokens_per_s_per_gpu"]) / prediction["tokens"]))
        near = sum((a - b) ** 2 for a, b in zip(x, start, strict=True))
        return sum(error**2 for error in errors) / len(errors) + 0.002 * near

    solution = minimize(loss, start, method="Nelder-Mead", options={"maxiter": 4000, "xatol": 1e-4, "fatol": 1e-8})
    return {name: round(min(math.exp(value), 1.0), 3) for name, value in zip(FITTED, solution.x, strict=True)}


def tables(runs: list[dict[str, str]], predictions: list[dict[str, Any]]) -> None:
    """Fit the shares and print the tables.

    Args:
        runs: Rows of the published runs.
        predictions: The prediction, or the error, of each run.
    """
    rows = [(run, answer) for run, answer in zip(runs, predictions, strict=True) if "error" not in answer]
    efficiency = {}
    for gpu in ("H100", "H200"):
        gpu_rows = [row for row in rows if gpu in row[0]["gpu"] and row[0]["tokens_per_s_per_gpu"]]
        efficiency[gpu] = fitted(gpu_rows[::2])
        print(f"{gpu}: {efficiency[gpu]}")
        for half, part in (("fitted", gpu_rows[::2]), ("tested", gpu_rows[1::2])):
            sizes = sorted(abs(error_of_time(*row, efficiency[gpu])) for row in part)
            near = sum(size <= 0.2 for size in sizes) / len(sizes)
            median = statistics.median(sizes)
            print(f"  {half}: {len(sizes)} runs, median error {median:.1%}, {near:.0%} within 20 %")
    head = ["model", "GPUs", "tokens", "parallel", "recomputed", "compiled", "precision"]
    head += ["published memory", "predicted", "", "published tok/s", "predicted", ""]
    print("\n| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    errors: dict[str, list[float]] = {"reserved": [], "allocated": []}
    for run, answer in zip(runs, predictions, strict=True):
        degrees = ", ".join(f"{key} {run[key]}" for key in ("tp", "cp", "pp") if run[key] not in ("", "1"))
        head = [*(run[key] for key in ("model", "gpus", "seq_len")), degrees]
        head += [run[key] for key in ("ac", "compile", "precision")]
        if "error" in answer:
            print("| " + " | ".join([*head, answer["error"], *[""] * 5]) + " |")
            continue
        unit = 1e9 if run["unit"] == "GB" else 2**30
        kind = "reserved"
        size = answer["reserved"]
        if _is_of_megatron(run):
            kind = "allocated"
            size = as_megatron(run, answer)
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

    Megatron keeps whole weights in bfloat16 and their gradients in float32 on each rank, and shards the optimizer's 12
    bytes a weight. This trainer shards all three, and gathers the weights of one or two layers. With TP, Megatron keeps
    a rank's own rows of the inputs of attention and feed-forward, and gathers all rows again in the backward. Its
    products that add to float32 gradients return an empty gradient in bfloat16. At the peak, this is the empty gradient
    of the output's weight.

    Args:
        run: A row of the published runs.
        answer: The run's prediction.
    """
    purposes = answer["purposes"]
    ranks = int(run["dp_shard"]) * int(run["cp"])
    ours = sum(purposes.get(name, 0.0) for name in ("parameters", "gradients", "optimizer", "gathered", "reduced"))
    weights = purposes["parameters"] / 4 * ranks
    tp = int(run["tp"])
    tokens = int(run["micro_batch"]) * int(run["seq_len"]) // int(run["cp"])
    rows = 2 * int(run["layers"]) * tokens * int(run["dim"]) * 2 * (1 - 1 / tp)
    empty = 2 * int(run["vocab"]) * int(run["dim"]) / tp
    return answer["allocated"] - ours + weights * (2 + 4 + 12 / ranks) - rows + empty


def error_of_time(run: dict[str, str], answer: dict[str, Any], efficiency: dict[str, float]) -> float:
    """Return the relative error of the predicted tokens a second; positive if the prediction is faster.

    Args:
        run: A row of the published runs.
        answer: The run's prediction.
        efficiency: Shares of the GPU's peaks, by the names in `FITTED`.
    """
    predicted = answer["tokens"] / seconds(run, answer, record_of(run), efficiency)
    return predicted / float(run["tokens_per_s_per_gpu"]) - 1


def main() -> None:
    """Trace the published runs or read earlier traces, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the predictions of all runs")
    parser.add_argument("--read", type=Path, help="read predictions that were written before")
    parser.add_argument("--only", default="", help="a part of the names of models")
    args = parser.parse_args()
    runs = [run for run in csv.DictReader(RUNS.open()) if args.only in run["model"]]
    predictions = json.loads(args.read.read_text())["runs"] if args.read else traced(runs)
    if args.json:
        head = made_with("scripts/benchmarks/planner.py", sys.argv[1:], device="none")
        args.json.write_text(json.dumps(head | {"runs": predictions}))
    tables(runs, predictions)


if __name__ == "__main__":
    main()
