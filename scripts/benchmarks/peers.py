"""`lct train` against transformers, TRL and peft: loss, gradient norm, speed and memory of the same training.

    python scripts/benchmarks/peers.py SmolLM2-135M-Instruct --json docs/measurements/peers.json
    python scripts/benchmarks/peers.py --tiny --steps 2

Each case has the same model, conversations (examples/about_itself.jsonl), labels, order, AdamW and learning rate on
both sides, in float32 on the CPU. Each contender is a process of its own, `lct train` with its ranks; contenders take
turns. A one-rank process and each peer get `--threads` threads (OMP_NUM_THREADS). Two ranks share them, each with one
at least. Without MODEL, `--tiny` makes a small model. A file of `--json` keeps the cases that `--cases` leaves out.

transformers' embedding drops the gradient of the pad token (`padding_idx`); the peers run without that rule, because
SmolLM2's pad token ends every message. One step in float64 shows its effect.

Tokens are counted without padding. Speed is the median over the steps of all repeats, without the first step of each
run. On a machine with other work, tokens a second of CPU time of all processes are steadier. Memory is the largest
resident size of the largest process, from its start to its end.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not

from transformers import AutoTokenizer

from scripts.benchmarks.peers_data import (
    conversations,
    order,
    preference_pairs,
    token_ids,
)
from scripts.benchmarks.peers_runs import CASES, DATA, LAYOUTS, ROOT, Setting, first_adapters, memory, ours, peer
from scripts.differences import largest_difference
from scripts.provenance import made_with
from scripts.tiny_model import write_tiny_model

# ---- rows


_SHOWN = (("tokens_per_second", 0), ("tokens_per_cpu_second", 0), ("peak_gib", 1))


def row(runs: Sequence[Mapping[str, Any]], tokens: Sequence[int]) -> dict[str, Any]:
    """Return the numbers of a contender: values of the first run, speed of all runs, largest memory.

    Args:
        runs: A run for each repeat.
        tokens: Tokens of each step, without padding.
    """
    work = sum(tokens[1:])
    cpu = [run["cpu"][-1] - run["cpu"][0] for run in runs]
    speeds = [n / s for run in runs for n, s in list(zip(tokens, run["seconds"], strict=True))[1:]]
    norms = {name: runs[0][name] for name in ("losses", "norms", "reported_norms") if name in runs[0]}
    speed = {"tokens_per_second": statistics.median(speeds), "tokens_per_second_fastest": max(speeds)}
    speed["tokens_per_cpu_second"] = statistics.median(work / max(used, 0.01) for used in cpu)
    return (
        norms
        | {name: round(x, 1) for name, x in speed.items()}
        | {"peak_gib": round(max(run["peak_gib"] for run in runs), 2)}
    )


def differences(ours_rows: Mapping[str, Any], peer_rows: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the largest relative differences of each layout and each peer.

    Args:
        ours_rows: Rows of `lct train` by layout.
        peer_rows: Rows of the peers by name.
    """
    return [
        {
            "layout": layout,
            "peer": name,
            "loss": largest_difference(trained["losses"], theirs["losses"]),
            "norm": largest_difference(trained["norms"], theirs["norms"]),
            "reported_norm": largest_difference(trained["norms"], theirs["reported_norms"]),
        }
        for layout, trained in ours_rows.items()
        for name, theirs in peer_rows.items()
    ]


def in_float64(setting: Setting, steps: list[list[int]]) -> dict[str, Any]:
    """Return loss and gradient norm of the first step in float64, of `lct train` and of transformers.

    transformers is run as it is, and without the `padding_idx` of its embedding, as in all other runs.

    Args:
        setting: What to train.
        steps: Numbers of the conversations of each step.
    """
    runs = {
        "lct train": ours(setting, "1 rank", ["--training.steps=1", "--checkpoint.no_enable"], dtype="float64"),
        "transformers": peer(setting, "transformers", steps[:1], dtype="float64"),
        "transformers as it is": peer(setting, "transformers", steps[:1], dtype="float64", padding_idx=True),
    }
    return {name: {"loss": values["losses"][0], "norm": values["norms"][0]} for name, values in runs.items()}


def measure(setting: Setting, layouts: Sequence[str], repeats: int) -> dict[str, Any]:
    """Run all contenders of a case in turn.

    Args:
        setting: What to train.
        layouts: Names of `LAYOUTS`.
        repeats: Runs of each contender.

    Returns:
        Rows of `lct train` and of the peers, and their differences.
    """
    case = CASES[setting.name]
    chats = conversations(DATA)
    if setting.name == "dpo":
        setting.data.write_text("".join(json.dumps(pair) + "\n" for pair in preference_pairs(chats)))
    tokenizer = AutoTokenizer.from_pretrained(setting.model)
    preset = f"--job.config_file={ROOT / 'train_configs' / case.preset}.toml"
    steps = order([preset, *setting.arguments("1 rank")], setting.data, tokenizer, setting.steps)
    lengths = document_lengths(setting, tokenizer)
    tokens = [sum(lengths[number] for number in numbers) for numbers in steps]
    adapters = first_adapters(setting) if setting.name == "lora" else ""
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(repeats):
        for layout in layouts:
            runs.setdefault(layout, []).append(ours(setting, layout))
        for name in case.peers:
            runs.setdefault(name, []).append(peer(setting, name, steps, adapters=adapters))
    rows = {name: row(each, tokens) for name, each in runs.items()}
    trained = {layout: rows[layout] for layout in layouts}
    theirs = {name: rows[name] for name in case.peers}
    predicted = {name: round(size, 4) for name, size in memory(setting).items()}
    result = {
        "tokens": tokens,
        "lct train": trained,
        "peers": theirs,
        "differences": differences(trained, theirs),
        "predicted_gib": predicted,
    }
    return result | ({"float64": in_float64(setting, steps)} if setting.name == "sft" else {})


def document_lengths(setting: Setting, tokenizer: Any) -> list[int]:
    """Return the tokens of each line of the data, both sides for a pair.

    Args:
        setting: What to train.
        tokenizer: transformers' tokenizer.
    """
    chats = conversations(DATA)
    if setting.name != "dpo":
        return [len(token_ids(tokenizer, chat)) for chat in chats]
    return [
        sum(len(token_ids(tokenizer, pair["prompt"] + pair[side])) for side in ("chosen", "rejected"))
        for pair in preference_pairs(chats)
    ]


def table(cases: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of all cases, as Markdown: a row for each peer and layout of `lct train`.

    Args:
        cases: What `measure` returned, by name of the case.
    """
    lines = [
        "| | peer | `lct train` | loss | gradient norm | tokens a second | tokens a CPU second | peak GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, case in cases.items():
        for each in case["differences"]:
            both = case["lct train"][each["layout"]], case["peers"][each["peer"]]
            speed, cpu, memory = (" / ".join(f"{x[key]:.{digits}f}" for x in both) for key, digits in _SHOWN)
            differing = f"{each['loss']:.1e} | {each['norm']:.1e}"
            lines.append(f"| {name} | {each['peer']} | {each['layout']} | {differing} | {speed} | {cpu} | {memory} |")
    return "\n".join(lines)


def sentence(case: Mapping[str, Any]) -> str:
    """Return what one step in float64 shows, as a sentence.

    Args:
        case: What `measure` returned for `sft`.
    """
    norms = {name: each["norm"] for name, each in case["float64"].items()}
    as_it_is = norms["transformers as it is"]
    return f"In float64 the first step has {norms['lct train']:.6f} here, {norms['transformers']:.6f} in " + (
        f"transformers without this rule, and {as_it_is:.6f} with it."
    )


def memory_sentence(cases: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what the planner predicts for one rank of each case, and what the process had, as a sentence.

    Args:
        cases: What `measure` returned, by name of the case.
    """
    compared = [
        f"{case['predicted_gib']['allocated'] + case['predicted_gib']['process']:.1f} and "
        f"{case['lct train']['1 rank']['peak_gib']:.1f} GiB ({name})"
        for name, case in cases.items()
        if "1 rank" in case["lct train"]
    ]
    return f"Predicted and measured on one rank: {', '.join(compared)}."


# ---- command line


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    about = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = about.add_argument
    add("model", nargs="?", type=Path, help="folder of a model of Hugging Face; `lct get` makes one")
    add("--tiny", action="store_true", help="make a small model, and take it")
    add("--cases", default=",".join(CASES), help="some of the cases, with commas (default: all)")
    add("--layouts", default=",".join(LAYOUTS), help="some of the layouts, with commas (default: all)")
    add("--steps", type=int, default=10, help="steps of each run (default: 10)")
    add("--seq-len", type=int, help="tokens of a sequence of `lct train` (default: of the case)")
    add("--repeats", type=int, default=3, help="runs of each contender (default: 3)")
    add("--threads", type=int, default=os.cpu_count(), help="threads of each contender (default: one a CPU)")
    add("--json", type=Path, metavar="FILE", help="write the result there; other cases in it stay")
    return about


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables, and write the result to `--json`.

    Args:
        argv: The command line. None: the process's own.

    Returns:
        The exit code.
    """
    args = parser().parse_args(argv)
    cases, layouts = args.cases.split(","), args.layouts.split(",")
    unknown = [name for name in cases if name not in CASES] + [name for name in layouts if name not in LAYOUTS]
    if unknown or args.steps < 2 or args.repeats < 1 or args.tiny == (args.model is not None):
        names = f"--cases of {', '.join(CASES)}; --layouts of {', '.join(LAYOUTS)}"
        print(f"name MODEL or --tiny; {names}; --steps from 2; --repeats from 1", file=sys.stderr)
        return 2
    head = made_with("scripts/benchmarks/peers.py", sys.argv[1:] if argv is None else argv, device="cpu")
    head |= {name: version(name) for name in ("transformers", "trl", "peft")}
    kept = json.loads(args.json.read_text())["cases"] if args.json and args.json.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model.resolve() if args.model else Path(scratch, "tiny")
        if args.tiny:
            texts = [message["content"] for chat in conversations(DATA) for message in chat]
            write_tiny_model(model, texts, positions=512)
        for name in cases:
            data = Path(scratch, "pairs.jsonl") if name == "dpo" else DATA
            seq_len = args.seq_len or CASES[name].seq_len
            setting = Setting(name, model, data, Path(scratch), args.steps, seq_len, args.threads)
            shown = {key: x for key, x in asdict(setting).items() if key in ("steps", "seq_len", "threads")}
            kept[name] = shown | {"repeats": args.repeats, "made_with": head} | measure(setting, layouts, args.repeats)
            print(table({name: kept[name]}) + "\n", flush=True)
            print(memory_sentence({name: kept[name]}) + "\n", flush=True)
            if name == "sft":
                print(sentence(kept[name]) + "\n", flush=True)
            if args.json:
                args.json.write_text(json.dumps(head | {"cases": kept}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
