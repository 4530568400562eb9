"""Files that commands read and that the reader or an earlier command provides: paths, and how they are made.

Stand-ins have the size of the debug model. Scripts run as documented commands do, warm and short.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from tests.repository.documented.pages import ROOT

_TEMPLATE = """{% for m in messages %}{{ m.role + m.content }}
{%- for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}<|eot_id|>
{%- endfor %}{%- if add_generation_prompt %}assistant{% endif %}"""
_TOKENIZER = "mkdir -p {0} && cp trainer/assets/python_4k.tiktoken {0}/tokenizer.model"
_MODEL = (
    "lct train --checkpoint.enable --model.name={1} --job.dump_folder=outputs/{1} && "
    "lct convert to-hf outputs/{1} {0} && rm -r outputs/{1} && " + _TOKENIZER.format("{0}/original")
)
_LINES = "for i in $(seq 20); do echo '{}'; done >> {}"
_TEXT = '{{"text": "the {} tale of some things"}}'
_CHAT = (
    '{"messages": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]}',
    '{"prompt": "Who wrote Faust?", "answer": "Goethe"}',
)
_PAIRS = (
    '{"prompt": [{"role": "user", "content": "2 + 3?"}], "chosen": [{"role": "assistant", "content": "5"}], '
    '"rejected": [{"role": "assistant", "content": "6"}]}',
    '{"prompt": "Who wrote Faust?", "chosen": "Goethe", "rejected": "Schiller"}',
)
_CALLS = (
    '{"messages": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "", "tool_calls": '
    '[{"function": {"name": "add", "arguments": {"a": 2, "b": 3}}}]}, {"role": "tool", "content": "5"}, '
    '{"role": "assistant", "content": "five"}]}'
)
_RECORD = '{"entries": [{"record_id": 1, "profiling_name": "gloo:all_reduce", "input_sizes": [[1]]}]}'
_GPU = "flops = 1e11\nbandwidth = 1e10\nlink = 1e9\nnetwork = 1e9\nmemory = 1e10"
_DATA = (
    'import glob, json; print(*(json.dumps({"text": open(page).read()}) for page in glob.glob("docs/*.md")), sep="\\n")'
)
_CHAT_MODEL = (
    "from pathlib import Path; from scripts.tiny_model import write_tiny_model; "
    'texts = [Path("examples/about_itself.jsonl").read_text()]; '
    'write_tiny_model(Path("outputs/SmolLM2-135M-Instruct"), texts, 1024)'
)


def _lines(path: str, *records: str) -> str:
    return "; ".join(_LINES.format(record, path) for record in records)


def _preset(*names: str) -> str:
    return rf"examples/fields/({'|'.join(names)})\.toml|outputs/domain_({'|'.join(names)})"


BROUGHT = {
    # text
    "books": "mkdir books && for page in docs/*.md; do cp $page books/$(basename $page .md).txt; done",
    "data": f"mkdir data && python -c '{_DATA}' > data/a.jsonl",
    "held_out.jsonl": _lines("held_out.jsonl", _TEXT.format("last")),
    "web.jsonl": _lines("web.jsonl", _TEXT.format("first")),
    "code.jsonl": _lines("code.jsonl", _TEXT.format("second")),
    "tokens": "lct tokenize --path 'data/*.jsonl' --output tokens --processes 1",
    "assets/tokenizer/original": _TOKENIZER.format("assets/tokenizer/original"),
    "my.tiktoken": "cp trainer/assets/python_4k.tiktoken my.tiktoken",
    "outputs/pages.tiktoken": "lct tokenizer train --dataset text --path 'docs/*.md' --output outputs/pages.tiktoken",
    # settings
    "books.toml": "sed -n '/^```toml/,/^```/p' README.md | grep -v '```' > books.toml",
    "my_torchtitan.toml": "cp tests/unit/torchtitan_configs/2026_02_llama3_8b.toml my_torchtitan.toml",
    "cpu.toml": f'printf \'[cpu]\\nname = "a CPU"\\ntype = "cpu"\\n{_GPU}\\n\' > cpu.toml',
    # models
    "Llama-3.2-1B": _MODEL.format("Llama-3.2-1B", "llama3"),
    "Qwen3-0.6B": "python -c 'from tests.unit.test_new_tokens import *; folder_with(Path(\"Qwen3-0.6B\"), 320)'",
    "Llama-3.2-1B-Instruct": f"cp -r ./Llama-3.2-1B Llama-3.2-1B-Instruct && "
    f"echo '{_TEMPLATE}' > Llama-3.2-1B-Instruct/chat_template.jinja",
    "outputs/SmolLM2-135M-Instruct": f"python -c '{_CHAT_MODEL}'",
    "Qwen3-8B": f"{_MODEL.format('Qwen3-8B', 'qwen3')} && echo '{_TEMPLATE}' > Qwen3-8B/chat_template.jinja",
    # conversations
    "chat.jsonl": _lines("chat.jsonl", *_CHAT),
    "pairs.jsonl": _lines("pairs.jsonl", *_PAIRS),
    "trajectories": f"mkdir trajectories; {_lines('trajectories/a.jsonl', _CALLS)}",
    # fields
    "fields.zarr": "python -m examples.fields.make_fields --output fields.zarr",
    "points.zarr": "python -m examples.fields.make_fields --output points.zarr --points 64",
    "weather.nc": 'python -c \'import numpy, xarray; data = ("time", "y", "x"), numpy.ones((2, 3, 4)); '
    'xarray.Dataset({"t": data}).to_netcdf("weather.nc", engine="h5netcdf")\'',
    # what runs leave
    "outputs/chat": "lct train sft --model.path ./Llama-3.2-1B-Instruct --training.dataset_path chat.jsonl "
    "--optimizer.lr 1e-5 --training.steps 200 --job.dump_folder outputs/chat",
    "outputs/llama3_8b/checkpoint/step-10000": "mkdir -p outputs/llama3_8b/checkpoint/step-10000",
    "outputs/debug_model/tb": "lct train",
    "outputs/pretrain": "lct train examples/pretrain/pretrain.toml --ngpu 1 --training.steps 4000",  # short: 80 steps
    "outputs/debug_model/comm_traces/rank_0": "mkdir -p outputs/debug_model/comm_traces && python -c "
    f"'import pickle, sys; pickle.dump({_RECORD}, sys.stdout.buffer)' > outputs/debug_model/comm_traces/rank_0",
}
_MADE = r"(?<!--output)(?<!--json)(?<!--job\.dump_folder)"
_NAMED = {
    "assets/tokenizer/original": rf"{_MADE}[\s=]assets/tokenizer(?=$|\s)",
    "books": r"lct train books\.toml",
    "fields.zarr": _preset("unet", "nat"),
    "outputs/SmolLM2-135M-Instruct": r"examples/finetune/finetune\.toml",
    "outputs/pages.tiktoken": r"examples/pretrain/pretrain\.toml|outputs/pretrain",
    "outputs/pretrain": r"examples/extend/extend\.toml",
    "points.zarr": _preset("points"),
    "trajectories": r"qwen3_8b_trajectories .*--model\.path",
}
"""Paths that commands do not name -> a regular expression for the commands that read them."""
_RUN = re.compile(r"(?:lct (?:generate|chat|serve|evaluate|verify|convert to-\w+)|forecast) (outputs/\w+)")


def brought(command: str, tree: Path, *, without: str = "") -> Iterator[tuple[str, str]]:
    """Yield the paths that a command reads and the scripts that make them, in the order of making.

    without: a path to leave out, because the command, itself such a script, makes it.
    """
    for path, script in BROUGHT.items():
        if path == without:
            continue
        named = rf"(?:^|{_MADE}[\s'\"=])(?:\./)?{re.escape(path)}(?=$|[\s'\"/])"
        if re.search(_NAMED.get(path, "(?!)"), command) or re.search(named, command):
            yield from brought(script, tree, without=path)
            yield path, script
    if not without and (run := _RUN.search(command)) and not (tree / run[1] / "config.toml").exists():
        config = run[1].replace("outputs/domain_", "examples/fields/") + ".toml" if "domain_" in run[1] else ""
        yield run[1], f"rm -rf {run[1]}; lct train {config} --checkpoint.enable --job.dump_folder {run[1]}"


def blocks(page: str) -> str:
    """Return the Python blocks of a page as one program."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE))
