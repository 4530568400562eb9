"""The commands of the documentation, and how each is run. See test_documented_commands.py."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "train_configs").glob("*.toml")),
    *sorted((ROOT / "examples").rglob("*.toml")),
    ROOT / "multinode_trainer.slurm",
]
_PROGRAMS = [
    *("lct", "curl", "make", "python", "python3", "torchrun", "pip", "git", "tensorboard", "./run_llama_train.sh"),
    *("sbatch", "scancel", "kill", "export", "source", "mkdir", "cp"),
]
_PROGRAM = rf"({'|'.join(map(re.escape, _PROGRAMS))}|\.venv/bin/\S+)(\s|$)"
_COMMAND = re.compile(rf"(\$ )?([A-Z_]+=\S+ )*({_PROGRAM}|for \w+ in [^:]*;)")


def commands(path: Path) -> Iterator[str]:
    """Yield the commands of a page, each in one line: from code in Markdown, from comments in other files."""
    lines, fence = iter(path.read_text().splitlines()), ""
    for line in lines:
        if path.suffix != ".md":
            code = line.removeprefix("#").strip() if line.startswith("#") else ""
        elif line.startswith("```"):
            fence, code = "" if fence else line, ""
        else:
            code = line.strip() if fence == "```bash" or (not fence and line.startswith("    ")) else ""
        if not _COMMAND.match(code):
            continue
        while code.endswith("\\") or _quote_is_open(code):
            joined = "\n" if _quote_is_open(code.removesuffix("\\")) else ""
            code = code.removesuffix("\\") + joined + next(lines).lstrip("# ")
        yield re.sub(r"\s+# .*", "", code).strip()


def _quote_is_open(code: str) -> bool:
    try:
        shlex.split(code, comments=True)
    except ValueError:
        return True
    return False


def all_commands() -> dict[str, list[str]]:
    """Return every command with the pages where it stands."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for command in commands(page):
            found.setdefault(command, []).append(str(page.relative_to(ROOT)))
    return found


@dataclass(frozen=True)
class Rule:
    """How commands that match `pattern`, whole, are run in a fresh copy of the repository."""

    pattern: str
    run: str = r"\g<0>"
    """What bash runs: a template of the match. As written, if `why` is empty."""
    why: str = ""
    """Why something else is run."""
    first: str = ""
    """Commands before it: what the reader brings, or an earlier command of the page has made."""
    says: str = ""
    """A regular expression for what is printed."""
    code: int = 0
    slow: bool = True

    def text(self, command: str) -> str | None:
        """Return what is run for a command, or None if it has another rule."""
        match = re.fullmatch(self.pattern, command, re.DOTALL)
        return match and match.expand(self.run)


SHORT = "--training.steps=2 --training.seq_len=64 --training.global_batch_size=-1"
LONG = "a hundred steps take minutes"
BIG = "it needs GPUs: all is checked that can be checked without"
OWN = "the reader brings the files"
SLOW = "it takes minutes"
_SMALL = "--trajectories 4 --frames 6 --height 32 --width 32"
SMALL_FIELDS = f"trap 'rm -rf fields.zarr' EXIT; python -m examples.fields.make_fields --output fields.zarr {_SMALL}"
SMALL_POINTS = SMALL_FIELDS.replace("fields.zarr", "points.zarr") + " --points 64"
BENCHMARK = r"python scripts/benchmarks/"
SHOW = r"(?:\$ )?lct plan "
DATA = """mkdir -p data books && for i in $(seq 64); do
echo '{"text": "Once upon a time"}' >> data/a.jsonl; echo "a tale of $i and other things" > books/$i.txt; done"""
TOKENIZED = "rm -rf tokens; lct tokenize --path 'data/*.jsonl' --output tokens --processes 1"
SAVED = f"lct train --checkpoint.enable {SHORT}"
# A stand-in of the debug model's size.
LLAMA = f"""test -d Llama-3.2-1B || ({SAVED} && lct convert to-hf outputs/debug_model Llama-3.2-1B
mkdir Llama-3.2-1B/original && cp trainer/assets/python_4k.tiktoken Llama-3.2-1B/original/tokenizer.model)"""
CHAT = """cp -r Llama-3.2-1B Llama-3.2-1B-Instruct
echo '{% for m in messages %}{{ m.role + m.content }}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}assistant{% endif %}' > Llama-3.2-1B-Instruct/chat_template.jinja
for i in $(seq 20); do
echo '{"messages": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]}'
echo '{"prompt": "Who wrote Faust?", "answer": "Goethe"}'; done > chat.jsonl"""

# Trajectories, and a stand-in of Qwen3 with a template that writes calls.
TRAJECTORIES = f"""test -d Qwen3-8B ||
(lct train --checkpoint.enable --model.name=qwen3 --job.dump_folder=outputs/qwen {SHORT}
lct convert to-hf outputs/qwen Qwen3-8B
mkdir Qwen3-8B/original && cp trainer/assets/python_4k.tiktoken Qwen3-8B/original/tokenizer.model
echo '{{% for m in messages %}}{{{{ m.role + m.content }}}}
{{%- for c in m.tool_calls %}}{{{{ c.function | tojson }}}}{{% endfor %}}<|eot_id|>
{{%- endfor %}}{{%- if add_generation_prompt %}}assistant{{% endif %}}' > Qwen3-8B/chat_template.jinja)
rm -rf trajectories; mkdir trajectories; for i in $(seq 20); do
echo '{{"messages": [{{"role": "user", "content": "2 + 3?"}}, {{"role": "assistant", "content": "", "tool_calls":
[{{"function": {{"name": "add", "arguments": {{"a": 2, "b": 3}}}}}}]}}, {{"role": "tool", "content": "5"}},
{{"role": "assistant", "content": "five"}}]}}' | tr -d '\\n' >> trajectories/a.jsonl
echo >> trajectories/a.jsonl; done"""
_ON_TRAJECTORIES = (
    "lct train qwen3_8b_trajectories --ngpu 2 --model.path ./Qwen3-8B --parallelism.context_parallel_degree=2 "
    "--training.seq_len=128 --training.steps=2 --training.global_batch_size=-1"
)
TALK = f"{TRAJECTORIES}; test -d outputs/talk || {_ON_TRAJECTORIES} --job.dump_folder=outputs/talk"
SERVED = (
    "port=$((20000 + RANDOM % 10000)); lct serve outputs/talk --tokens 4 --port $port > served.log & server=$!; "
    "trap 'kill $server' EXIT; until grep -q answers served.log; do kill -0 $server; sleep 1; done; "
)
PAIRS = """for i in $(seq 20); do
echo '{"prompt": [{"role": "user", "content": "2 + 3?"}], "chosen": [{"role": "assistant", "content": "5"}],
 "rejected": [{"role": "assistant", "content": "6"}]}' | tr -d '\\n'; echo
echo '{"prompt": "Who wrote Faust?", "chosen": "Goethe", "rejected": "Schiller"}'; done > pairs.jsonl"""

ADAPT = (
    f"{CHAT}; lct train --model.path ./Llama-3.2-1B-Instruct "
    "--training.dataset chat --training.dataset_path chat.jsonl --training.data_streams 8 "
    "--lora.rank 2 "
    f"--checkpoint.enable {SHORT}"
)

RULES = [
    # ---- fields
    Rule(
        r"lct train examples/fields/points\.toml .*",
        rf"{SMALL_POINTS}; \g<0> --training.steps=2 --training.data_streams=4",
        why=LONG,
        says="training done: 2 steps",
    ),
    Rule(
        r"python -m examples\.fields\.forecast outputs/domain_points .*",
        rf"{SMALL_POINTS}; lct train examples/fields/points.toml --training.steps=2 --training.data_streams=4; "
        r"\g<0> --steps 2",
        why=LONG,
        says=r"error of the model(?s:.*)points\.png",
    ),
    Rule(
        r"lct train (examples/fields/\w+\.toml) .*",
        rf"{SMALL_FIELDS}; \g<0> --training.steps=2 --training.data_streams=4",
        why=LONG,
        says="training done: 2 steps",
    ),
    Rule(
        r"(?:python|torchrun --nproc-per-node 2) -m examples\.fields\.forecast outputs/domain_(\w+) .*",
        rf"{SMALL_FIELDS}; lct train examples/fields/\1.toml --training.steps=2 --training.data_streams=4; "
        r"\g<0> --steps 2",
        why=LONG,
        says=r"error of the model(?s:.*)(forecast\.png|predicted\.zarr)",
    ),
    # ---- README: from a clone to a run
    Rule(
        r"make train",
        f"make -n train | grep -v pip | sed 's/checkpoint.enable/& {SHORT}/; s/--prompt/--tokens 4 &/' | bash -e",
        why=f"{LONG}; packages are installed",
        says=r"(?s)training done: 2 steps .*next +\S*lct generate .*def __init__",
    ),
    Rule(
        r"make (test|test-wide|check|test-all|test-versions|mutants)",
        r"make -n \1",
        why="this test is part of it",
        slow=False,
    ),
    Rule(r"make test-gpu", r"ls $(make -n \g<0> | grep -o 'tests/[^ ]*')", why=BIG, slow=False),
    Rule(r"make (lint|docs)"),
    Rule(
        r"python3 -m venv \.venv && \.venv/bin/pip install (torch==\S+) --index-url \S+",
        r"python3 -m venv --without-pip elsewhere && grep '^\1 ' requirements.txt",
        why="it downloads gigabytes; the version must be the one that is tested",
    ),
    Rule(
        r"\.venv/bin/pip install '\.\[(float8|linear)\]'",
        r"grep '^\1 = ' pyproject.toml",
        why="packages are installed; test_package.py builds and installs the package",
        slow=False,
    ),
    Rule(r"source \.venv/bin/activate", r"\g<0> && command -v lct | grep '\.venv/bin/lct'", "the place is checked"),
    Rule(
        r"lct train books\.toml --ngpu 2",
        r"sed -n '/^```toml/,/^```/p' README.md | grep -v '```' > books.toml; "
        rf"\g<0> --job.dump_folder=outputs/toml {SHORT}",
        why=LONG,
        first=DATA,
        says="training done: 2 steps",
    ),
    Rule(r"lct train --job\.imports my_llama .*", ":", why="test_your_own_model.py runs it", slow=False),
    Rule(r"\$ .* \| grep .*|\$ python -c .*", ":", why="test_outputs_are_those_of_the_commands runs it", slow=False),
    Rule(
        r"lct check my_torchtitan\.toml .*",
        first="cp tests/unit/torchtitan_configs/2026_02_llama3_8b.toml my_torchtitan.toml",
        slow=False,
    ),
    Rule(
        r"lct check examples/fields/.*",
        SMALL_FIELDS + r" && \g<0>",
        "it reads the fields",
        says="at its peak a step of a rank needs",
        slow=False,
    ),
    Rule(r"lct check .*", says="at its peak a step of a rank needs", slow=False),
    Rule(
        r"lct estimate debug_model --calibrate (\S+)",
        r"printf '[cpu]\nname = \"a CPU\"\ntype = \"cpu\"\nflops = 1e11\nbandwidth = 1e10\nlink = 1e9\nnetwork = 1e9\n"
        r"memory = 1e10\n' > \1",
        why="it takes a minute, and needs a quiet machine",
    ),
    Rule(
        r"lct estimate (debug_model .*--picture (\S+))",
        r"\g<0> && test -s \2",
        why="the picture is looked for",
        says="it fits",
    ),
    Rule(
        r"lct estimate \S+ --world-size \d+ (--max-seq-len|--suggest \S+)",
        r"lct estimate debug_model --world-size 2 --training.seq_len 4096 --gpu a100 \1",
        why=SLOW,
        says="it fits",
    ),
    Rule(
        r"lct estimate qwen3_8b_trajectories --world-size 8",
        r"mkdir aside; for f in Qwen3-8B trajectories; do test ! -d $f || mv $f aside; done; "
        r"trap 'mv aside/* .; rmdir aside' EXIT; \g<0>",
        why="a stand-in of another size may be there",
        says="tokens a second",
    ),
    # What a preset says in its first lines that it is for.
    Rule(
        r"lct estimate (deepseek_v3|granite4_h_small|kimi_linear_48b|qwen3_next_80b|\w+_1m) --world-size \d+",
        says="it fits",
    ),
    Rule(r"lct estimate .*", says="tokens a second"),
    Rule(rf"{SHOW}.* --output (\S+).*", r"\g<0> && test -s \1", "the picture is looked for"),
    Rule(rf"{SHOW}.*", says="[Rr]ank", slow=False),
    Rule(r"lct train \S+ --print-config", says=r'flavor = "70B"', slow=False),
    # ---- big models
    Rule(
        r"lct train (train_configs/)?llama3_8b\S* --ngpu [18].*|NGPU=8 CONFIG_FILE=\S+8b.toml \./run_llama_train\.sh",
        r"\g<0> --check-config --world-size 8",
        why=BIG,
        says="the settings are valid",
        slow=False,
    ),
    Rule(
        r"torchrun --nproc-per-node 8 (.*)",
        r"torchrun --nproc-per-node 2 \1 --check-config --world-size 8",
        why=BIG,
        says="the settings are valid",
    ),
    Rule(
        r"torchrun --nnodes 2 --nproc-per-node 8 (.*)node-a(.*)",
        r"torchrun --nnodes 1 --nproc-per-node 2 \1localhost\2 --check-config --world-size 16",
        why=BIG,
        says="the settings are valid",
    ),
    Rule(
        r"(?:for .*; do )?(?:CONFIG_FILE=(\S+) )?sbatch [^;]*multinode_trainer\.slurm([^;]*)(?:; done)?",
        r"bash -n multinode_trainer.slurm && lct check \1 \2 --world-size 64",
        why="it needs Slurm; test_several_nodes.py runs the script with stand-ins",
        says="the settings are valid",
        slow=False,
    ),
    Rule(r"scancel .*", ":", why="it needs Slurm", slow=False),
    Rule(r"export .*", slow=False),
    # ---- trajectories
    Rule(
        r"lct data show qwen3_8b_trajectories --model\.path \./Qwen3-8B",
        r"\g<0> --training.seq_len=128",
        why=OWN,
        first=TRAJECTORIES,
        says=r"20 +[\d,]+ +\d+\.\d%(?s:.*)document 0: (?s:.*)five",
    ),
    Rule(
        r"lct train qwen3_8b_trajectories --ngpu 8 --model\.path \./Qwen3-8B",
        _ON_TRAJECTORIES,
        why=f"{BIG}; {OWN}",
        first=TRAJECTORIES,
        says=r"20 documents, (?s:.*)weights saved for Hugging Face(?s:.*)training done",
    ),
    Rule(
        r"lct chat outputs/\w+( --ngpu \d( --context-parallel \d)?)?",
        "echo '2 + 3?' | lct chat outputs/talk --tokens 4",
        why="the folder of a short run, and a message in the place of a user",
        first=TALK,
    ),
    Rule(
        r"lct serve outputs/\w+ --port \d+",
        f"{SERVED}curl -sS http://127.0.0.1:$port/v1/models",
        why="the folder of a short run, and a server that ends",
        first=TALK,
        says='"id": ?"talk"',
    ),
    Rule(
        r"curl http://127\.0\.0\.1:8000(/v1/chat/completions .*)",
        rf"{SERVED}curl -sS http://127.0.0.1:$port\1",
        why="the folder of a short run, and a server that ends",
        first=TALK,
        says=r'"role": ?"assistant"',
    ),
    Rule(
        r"lct generate outputs/\w+ --chat( .*)",
        r"lct generate outputs/talk --chat\1 --tokens 4",
        why="the folder of a short run",
        first=TALK,
    ),
    Rule(r"lct data show debug_model .*", says=r"all +[\d,]+(?s:.*)document 0: "),
    Rule(
        r"lct data show llama3_8b_sft .*",
        r"trap 'rm -rf chat.jsonl Llama-3.2-1B-Instruct first.html' EXIT; "
        rf"{CHAT}; \g<0> --model.path ./Llama-3.2-1B-Instruct --training.seq_len=64 && grep -c '<b>' first.html",
        why=OWN,
        first=LLAMA,
        says="document 0: ",
    ),
    # ---- weights of Hugging Face
    Rule(
        r"(lct train --model\.path \./Llama.*) (--training\.dataset chat .*)",
        rf"trap 'rm -rf chat.jsonl Llama-3.2-1B-Instruct' EXIT; {CHAT}; \g<0> {SHORT}",
        why=f"{LONG}; a small model stands in",
        first=f"rm -rf outputs/chat; {LLAMA}",
        says=r"weights saved for Hugging Face(?s:.*)training done",
    ),
    Rule(
        r"(lct train --model\.path \./Llama.*) (--training\.dataset preferences .*)",
        rf"trap 'rm -rf chat.jsonl pairs.jsonl Llama-3.2-1B-Instruct' EXIT; {CHAT}; {PAIRS}; \g<0> {SHORT}",
        why=f"{LONG}; a small model stands in",
        first=f"rm -rf outputs/dpo; {LLAMA}",
        says=r"rewards_accuracy(?s:.*)training done|training done",
    ),
    Rule(
        r"lct train --model\.path \./Llama\S+(?: .*)?",
        rf"\g<0> {SHORT}",
        why=f"{LONG}; a small model stands in",
        first=LLAMA,
        says="the weights are those of ./Llama(?s:.*)training done",
    ),
    Rule(
        r"lct train --checkpoint\.enable --checkpoint\.folder s3://.*",
        rf"python -m tests.s3_server \g<0> {SHORT}",
        why="a server on this machine stands in for the store",
        first="rm -rf outputs/debug_model",
        says="weights      s3://bucket/run/step-2",
    ),
    Rule(
        r"lct train --checkpoint\.enable --checkpoint\.last_save_in_hf",
        rf"\g<0> {SHORT}",
        why=LONG,
        first="rm -rf outputs/debug_model",
        says="weights saved for Hugging Face(?s:.*)training done",
    ),
    Rule(
        r"lct convert to-peft (\S+) (\S+)",
        rf"rm -rf \1; trap 'rm -rf \1 \2 chat.jsonl Llama-3.2-1B-Instruct' EXIT; {ADAPT} --job.dump_folder \1 && \g<0>",
        why=f"{LONG}; a small model stands in",
        first=LLAMA,
        says="peft loads them",
    ),
    Rule(
        r"lct convert add-tokens (\S+) (\S+) .*",
        r"rm -rf \2; trap 'rm -rf \1 \2' EXIT; "
        r"""python -c "from tests.unit.test_new_tokens import *; folder_with(Path('\1'), 320)" && \g<0>""",
        why="a small model stands in",
        says="name it in model.path to train them",
    ),
    Rule(r"lct convert to-hf .*", r"rm -rf exported && \g<0>", why=OWN, first=SAVED, says="transformers loads it"),
    Rule(r"python scripts/check_model.py .*", first=LLAMA, says=r"gradients  equal"),
    # ---- training
    Rule(
        r"(lct train --training\.dataset text .*)",
        rf"\1 {SHORT} --training.data_streams=8",
        why=LONG,
        first=DATA,
        says="training done: 2 steps",
    ),
    Rule(
        r"lct train --model\.tokenizer_path (\S+)",
        rf"\g<0> {SHORT}",
        why=LONG,
        first="mkdir -p assets/tokenizer/original && cp trainer/assets/python_4k.tiktoken "
        "assets/tokenizer/original/tokenizer.model",
        says="training done",
    ),
    Rule(
        r"lct train --validation\.enable .* held_out\.jsonl .*",
        "trap 'rm -f held_out.jsonl' EXIT; "
        """for i in $(seq 40); do echo '{"text": "a tale of some things that are held out"}'; done > held_out.jsonl; """
        rf"\g<0> {SHORT} --validation.sequences 4",
        why=OWN,
        says="validation after step 2: loss",
    ),
    Rule(
        r"lct train .* --mixture\.names .*",
        "trap 'rm -f web.jsonl code.jsonl' EXIT; "
        """for i in $(seq 40); do echo '{"text": "a tale of some things"}' | tee -a web.jsonl >> code.jsonl; done; """
        rf"\g<0> {SHORT}",
        why=OWN,
        says="web 70.0%, code 30.0%(?s:.*)training done",
    ),
    Rule(
        r"lct train --profiling\S+ .*",
        r"\g<0> --training.steps=20 --training.seq_len=16 --training.global_batch_size=-1 "
        "&& test -f outputs/debug_model/profile_trace/iteration_20/rank0_trace.json",
        why=LONG,
    ),
    Rule(
        r"lct train --float8\S+ .*", rf"\g<0> --float8.emulate {SHORT}", why="float8 needs a GPU", says="training done"
    ),
    Rule(
        r"(lct train --training\.dataset tokens --training\.dataset_path tokens) .*",
        rf"\1 {SHORT} --training.data_streams=2",
        OWN,
        first=f"{DATA}; {TOKENIZED}",
        says="training done",
    ),
    Rule(r"lct train --checkpoint\.enable --checkpoint\.interval 50", rf"\g<0> --checkpoint.interval=1 {SHORT}", LONG),
    Rule(
        r"lct verify outputs/books",
        "lct verify outputs/debug_model",
        why=OWN,
        first=f"rm -rf outputs/debug_model; {SAVED}",
        says="step-2: whole",
    ),
    Rule(
        r"lct verify outputs/debug_model\S*",
        first=f"rm -rf outputs/debug_model; {SAVED}",
        says="step-2: whole: 3 files",
    ),
    Rule(
        r"lct train --checkpoint\.enable --training\.steps \d+( --ngpu 4)?",
        rf"\g<0> {SHORT} --training.steps=3",
        why=LONG,
        first=f"rm -rf outputs/debug_model; {SAVED}",
        says="resumed after step 2(?s:.*)training done",
    ),
    Rule(
        r"lct train --checkpoint\.enable --training\.steps 300 --checkpoint\.load_step 50",
        rf"\g<0> {SHORT} --training.steps=3 --checkpoint.load_step=1",
        why=LONG,
        first=f"rm -rf outputs/debug_model; {SAVED} --checkpoint.interval=1",
        says="resumed after step 1(?s:.*)training done",
    ),
    Rule(
        r"lct train debug_model --job\.dump_folder outputs/short .*",
        r"\g<0> --training.seq_len=64 --training.global_batch_size=-1",
        why=LONG,
        first="rm -rf outputs/short",
        says="training done: 20 steps",
    ),
    Rule(
        r"lct train debug_model --job\.dump_folder outputs/long .*",
        r"\g<0> --training.seq_len=256",
        why=LONG,
        says="resumed after step 20(?s:.*)training done: 5 steps",
    ),
    Rule(
        r"NODE_RANK=\d NNODES=2 MASTER_ADDR=node-a (.*)|NODE_RANK=\d NGPU=1 NNODES=2 MASTER_ADDR=localhost (.*)",
        rf"export NGPU=1 NNODES=2 MASTER_ADDR=localhost MASTER_PORT=29517; (NODE_RANK=1 ./run_llama_train.sh "
        rf"{SHORT} --job.dump_folder=outputs/nodes &); NODE_RANK=0 ./run_llama_train.sh {SHORT} "
        r"--job.dump_folder=outputs/nodes",
        why=f"{LONG}; two nodes on one machine",
        says="training done",
    ),
    Rule(r"(lct train|(NGPU=\d )?\./run_llama_train\.sh)( .*)?", rf"\g<0> {SHORT}", LONG, says="training done"),
    Rule(r"python train\.py (--job\.config_file \S+ )?--training\..*", rf"\g<0> {SHORT}", LONG, says="training done"),
    Rule(r"\$ python train\.py .*", code=2, says=r"^error: "),
    # ---- after a run
    Rule(
        r"lct generate (\./Llama-3\.2-1B .*)",
        r"lct generate \1 --tokens 4",
        why=OWN,
        first=LLAMA,
        says=r"^def main\(",
    ),
    Rule(
        r"lct evaluate \./Llama-3\.2-1B .*",
        "lct evaluate ./Llama-3.2-1B --seq-len 128 --ngpu 2 --parallelism.context_parallel_degree 2 "
        "--sequences 2 --samples 1",
        why=f"{BIG}; {OWN}",
        first=LLAMA,
        says="64 to 127 .*(?s:.*)needle",
    ),
    Rule(
        r"lct evaluate outputs/\w+( --tasks (?:positions|needle))?.*",
        r"lct evaluate outputs/saved\1 --seq-len 128 --sequences 2 --lengths 128 --samples 1",
        why="the folder of a short run, and short sequences",
        first=f"test -d outputs/saved || {SAVED} --job.dump_folder=outputs/saved",
        says="positions|needle",
    ),
    Rule(
        r"lct generate outputs/\w+( .*)?",
        r"lct generate outputs/saved\1 --tokens 4",
        why="the folder of a short run",
        first=f"test -d outputs/saved || {SAVED} --job.dump_folder=outputs/saved",
    ),
    Rule(
        r"tensorboard --logdir \S+",
        r"\g<0> --inspect",
        "a server does not end",
        first=f"lct train {SHORT}",
        says="loss",
    ),
    Rule(r"mkdir -p .*debug\S*|mkdir -p outputs/long/checkpoint && cp .*"),
    Rule(r"mkdir -p .*", slow=False),
    Rule(
        r"cp -r (\S+) \S+",
        first=r"mkdir -p outputs/llama3_8b/checkpoint/step-10000 outputs/llama3_8b_long/checkpoint",
        slow=False,
    ),
    Rule(
        r"(python scripts/compare.py .*?)(?: -- (.*))?",
        r"\1 --steps 1 --tolerance 1e-3 -- \2 --training.seq_len=64 --training.global_batch_size=4",
        why=LONG,
        says="the same: ",
    ),
    # ---- tokenizers and data
    Rule(
        r"python scripts/download_tokenizer.py .*",
        r"HF_HUB_OFFLINE=1 \g<0>",
        why="it needs the network and a token",
        code=2,
        says="the Hugging Face hub cannot be reached",
    ),
    Rule(
        r"(python scripts/train_tokenizer.py .*) --vocab-size 32000(.*)",
        r"\1 --vocab-size 260\2",
        OWN,
        first=DATA,
        says="260 tokens",
    ),
    Rule(
        r"python scripts/train_tokenizer.py --output (\S+)",
        r"cp \1 kept && \g<0> --vocab-size 300 && mv kept \1",
        why="4,096 words take minutes; later commands need the shipped tokenizer",
        says="300 tokens",
    ),
    Rule(
        r"lct tokenize --hub \S+ .*",
        r"HF_ENDPOINT=http://hub.invalid \g<0>",
        why="tests have no network",
        says="is not found at the Hugging Face hub",
        code=2,
        slow=False,
    ),
    Rule(
        r"lct tokenize .*--tokenizer-path assets/tokenizer --output tokens",
        TOKENIZED,
        why="the shipped tokenizer stands for that of Llama 3",
        first=DATA,
        says="tokens of",
        slow=False,
    ),
    Rule(
        r"(python -m examples\.fields\.make_fields --output \S+)( --points \d+)?.*",
        r"trap 'rm -rf *.zarr' EXIT; \1\2 --trajectories 2 --frames 2 --height 16 --width 16",
        why="the default size takes 15 s, and larger grids an hour",
        says="2 trajectories of 2 frames of (16 x 16|1024 points)",
        slow=False,
    ),
    # ---- measurements
    Rule(
        r"python scripts/proof\.py .*",
        "python scripts/proof.py --tiny --output outputs/proof",
        why="it takes half an hour",
        says="answers of lct and transformers: the same",
    ),
    Rule(rf"{BENCHMARK}planner\.py --read .*", says="tested: 13 runs"),
    Rule(r"python -m pytest tests/distributed/test_planner\.py", r"\g<0> --collect-only -q", why=SLOW, slow=False),
    Rule(rf"{BENCHMARK}calibrated\.py", r"\g<0> --only 768", SLOW, says="median error"),
    Rule(rf"{BENCHMARK}memory\.py .*", r"\g<0> --only nothing", SLOW),
    Rule(rf"{BENCHMARK}memory_runs\.py .*", r"\g<0> --help", BIG),
    Rule(rf"{BENCHMARK}block_memory\.py .*", r"\g<0>", says="KiB  attention, backward"),
    Rule(
        rf"{BENCHMARK}optimizers\.py .*",
        r"\g<0> --seeds 0 --steps 10 --json optimizers.json "
        "--arguments '--training.seq_len=64 --training.global_batch_size=4'",
        why=SLOW,
        says="after equal time",
    ),
    Rule(rf"{BENCHMARK}data\.py .*", r"\g<0> --megabytes 1 --batches 1 --rounds 1 --json data.json", SLOW),
    Rule(rf"{BENCHMARK}balance\.py .*", r"\g<0> --seq-len 1024 --mean 128 --output balance.json", SLOW),
    Rule(rf"{BENCHMARK}activation_checkpointing\.py .*", r"\g<0> --seq-len 64", SLOW),
    Rule(rf"{BENCHMARK}experts\.py .*", r"\g<0> --tokens 64 --layers 1 --rounds 1", SLOW, says="of_dense_model"),
    Rule(r"python -m tests\.fake_cuda.*", r"python -m tests.fake_cuda --only 'one GPU'", SLOW),
    Rule(rf"{BENCHMARK}attention_launches\.py.*", r"\g<0> --rounds 2", SLOW),
    Rule(rf"{BENCHMARK}chunked_loss\.py .*", r"\g<0> --tokens 64 --vocab 128 --rounds 1", SLOW),
    Rule(rf"{BENCHMARK}checkpoints\.py .*", r"\g<0> --dim 64 --layers 1 --rounds 1", SLOW),
    Rule(
        r"(python scripts/gpu_check\.py)( --device cpu)?( --blocks \S+)?(.*)",
        r"\1 --device cpu --blocks versions,tiles\4",
        why=f"{BIG}; all blocks on a CPU: test_gpu_check.py",
        says="no block failed",
    ),
    Rule(rf"{BENCHMARK}\w+\.py --device cuda .*", r"\g<0> --help", why=BIG),
    Rule(rf"{BENCHMARK}train\.py .*", r"\g<0> --seq-len 32 --rounds 1 --no-memory --features kernel=cpu_flash", SLOW),
    Rule(rf"{BENCHMARK}linear_attention\.py .*", r"\g<0> --seq-len 64 --degrees 2 --repeats 1", SLOW),
    Rule(rf"{BENCHMARK}context_parallel\.py .*", r"\g<0> --seq-len 64 --repeats 1", SLOW),
    Rule(
        r"(python -m examples\.fields\.netcdf) weather\.nc",
        r"\1 weather.nc; rm weather.nc",
        first="python -c \"import numpy, xarray; xarray.Dataset({'t': (('time', 'y', 'x'), numpy.ones((2, 3, 4)))})"
        ".to_netcdf('weather.nc', engine='h5netcdf')\"",
        says="weather.nc: t has mean 1",
        slow=False,
        why="the file is made first and removed",
    ),
    Rule(
        r"(python scripts/compare_shard_tensor\.py) --packages packages( .*)",
        r"\1",
        why=f"{SLOW}; ours alone",
        says="ours: 41 of 41 exact",
    ),
    Rule(rf"{BENCHMARK}domain_parallel\.py .*", r"\g<0> --sides 16 --repeats 1", SLOW),
    Rule(r"\.venv/bin/python -m pytest \S+ -k .*", r"\g<0> --collect-only -q", "these tests run by themselves"),
    Rule(
        r"\.venv/bin/python -m pytest (.*)",
        r"ls $(echo '\1' | grep -o 'tests/[^ ]*')",
        why="these tests run by themselves",
        slow=False,
    ),
    Rule(
        r"python -c 'import pickle; .*",
        why="",
        first='mkdir -p outputs/debug_model/comm_traces && python -c \'import pickle; pickle.dump({"entries": [{'
        '"record_id": 1, "profiling_name": "gloo:all_reduce", "input_sizes": [[1]]}]}, '
        'open("outputs/debug_model/comm_traces/rank_0", "wb"))\'',
        says="1 gloo:all_reduce",
        slow=False,
    ),
    Rule(r"torchrun --nproc-per-node 2 my_model\.py", first="cp docs/transformers.py my_model.py", says="loss"),
]
