"""The commands that cannot run as they stand, each with its reason. `shortened.py` has what makes the others short."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Instead:
    """Commands that match `pattern`, whole, are not run as they stand.

    why: the reason; instead: the text that bash runs, a template of the match; says: a regular expression of the
    output.
    """

    pattern: str
    why: str
    instead: str = ":"
    says: str = ""
    code: int = 0

    def text(self, command: str) -> str | None:
        """Return the text that bash runs instead of a command; None if this exception does not match it."""
        match = re.fullmatch(self.pattern, command, re.DOTALL)
        return match and match.expand(self.instead)


_HERE = "export NGPU=1 NNODES=2 MASTER_ADDR=localhost MASTER_PORT=29517"
_NODE = r"./run_llama_train.sh\g<rest> --job.dump_folder=outputs/nodes"
# The log of an earlier server says that it answers, so the file goes first.
_SERVED = (
    "rm -f served.log; port=$((20000 + RANDOM % 10000)); "
    "lct serve {} --tokens 4 --port $port > served.log & server=$!; trap 'kill $server' EXIT; "
    "until grep -qs answers served.log; do kill -0 $server; sleep 0.2; done; "
)

_OF_A_RELEASE = [
    Instead(
        r"pip install build twine",
        why="it needs the network; the workflow installs the same",
        instead=r"grep -- '-m \g<0>' .github/workflows/release.yml",
    ),
    Instead(
        r"python -m (build|twine check --strict dist/\*)",
        why="it needs the packages above; test_package.py builds the wheel, and the workflow runs the same",
        instead=r"grep 'run: \g<0>' .github/workflows/release.yml",
    ),
    Instead(
        r"pip --python outputs/clean (install dist/\*\.whl --extra-index-url \S+)",
        why="it needs the network; the workflow runs the same",
        instead=r"grep -F -- '\1' .github/workflows/release.yml",
    ),
    Instead(
        r"bash (\.ci/try_package) outputs/clean/bin/lct",
        why="test_github.py runs it with the program of this repository",
        instead=r"bash -n \1",
    ),
    Instead(
        r"git (commit|tag|push) .*",
        why="the next page starts from this history, and a push needs an account",
        instead=r"git \1 -h | grep '^usage: git \1'; true",
        says=r"^usage: git",
    ),
    Instead(
        r"docker build --build-arg IMAGE=\S+ -f (\S+) -t \S+ \.",
        why="it needs docker and the network; test_containers.py runs the steps that need neither",
        instead=r"grep '^ARG IMAGE=' \1",
    ),
    Instead(
        r"docker pull (\S+)",
        why="it needs docker and the network; the image must be the one of a file",
        instead=r"grep '^ARG IMAGE=\1$' docker/*.Dockerfile",
    ),
    Instead(r"docker (run|push) .*", why="it needs docker, and images that it has built"),
]

EXCEPTIONS = [
    Instead(
        r"make (chat|test|test-wide|check|check-all|test-all|test-versions|mutants)",
        why="this test is part of it, or it takes many minutes",
        instead=r"make -n \1",
    ),
    Instead(
        r"make docs",
        why="tests of these two make their outputs",
        instead=r"make -n docs | grep -v -e transformers_docs -e doc_outputs | bash -e",
        says="the site is in site/",
    ),
    Instead(r"make test-gpu", why="it needs a GPU", instead=r"ls $(make -n \g<0> | grep -o 'tests/[^ ]*')"),
    Instead(
        r"python3 -m venv \.venv && \.venv/bin/pip install (torch==\S+) --index-url \S+",
        why="it downloads gigabytes; the version must be the one that is tested",
        instead=r"grep '^\1 ' requirements.txt",
    ),
    Instead(
        r"\.venv/bin/pip install '\.\[(\w+)\]'",
        why="packages are installed; test_package.py builds and installs this one",
        instead=r"grep '^\1 = ' pyproject.toml",
    ),
    Instead(
        r"source \.venv/bin/activate",
        why="the shell ends with it, so that its effect is looked at",
        instead=r"\g<0> && command -v lct",
        says=r"\.venv/bin/lct$",
    ),
    Instead(r"python scripts/proof\.py .*", why="test_proof.py runs it"),
    Instead(r"python scripts/spot\.py .*", why="test_spot.py runs it"),
    Instead(r"python scripts/run_notebook\.py .*", why="test_notebook.py runs it"),
    Instead(r"lct get smollm2 --folder \S+", why="it downloads a model; a tiny one stands in, see brought.py"),
    Instead(r"python scripts/benchmarks/peers\.py .*", why="test_benchmark_peers.py runs its cases on a small model"),
    Instead(r"lct estimate debug_model --calibrate \S+", why="it takes a minute, and needs a quiet machine"),
    Instead(
        r"lct estimate qwen3_8b_trajectories --world-size \d+",
        why="a stand-in of another size is there",
        instead=r"rm -rf Qwen3-8B trajectories && \g<0>",
        says="tokens a second",
    ),
    Instead(
        r"lct data show llama3_8b_sft (.*)",
        why="a small model stands in",
        instead=r"lct data show llama3_8b_sft --model.path ./Llama-3.2-1B-Instruct --training.seq_len=64 \1",
        says="document 0: ",
    ),
    Instead(
        r"(?:for .*; do )?(?:CONFIG_FILE=(\S+) )?sbatch [^;]*multinode_trainer\.slurm([^;]*)(?:; done)?",
        why="it needs Slurm; test_several_nodes.py runs the script with stand-ins",
        instead=r"bash -n multinode_trainer.slurm && lct train \1 \2 --check-config --world-size 64",
        says="the settings are valid",
    ),
    Instead(r"scancel .*", why="it needs Slurm"),
    Instead(
        r"NODE_RANK=0 (NGPU=1 )?NNODES=2 MASTER_ADDR=\S+ \./run_llama_train\.sh(?P<rest>.*)",
        why="both nodes are this machine",
        instead=rf"{_HERE}; NODE_RANK=1 {_NODE} & NODE_RANK=0 {_NODE} && wait $!",
        says="training done",
    ),
    Instead(r"NODE_RANK=1 .*", why="it runs with the command of the first node"),
    Instead(
        r"lct train (.*s3://.*)",
        why="a server on this machine stands in for the store, and ends",
        instead=r"python -m tests.s3_server \g<0> --job.dump_folder=outputs/store",
        says="weights +s3://",
    ),
    Instead(
        r"lct serve (outputs/\w+) --port \d+",
        why="a server does not end",
        instead=_SERVED.format(r"\1") + "curl -sS http://127.0.0.1:$port/v1/models",
        says=r'"id": ?"',
    ),
    Instead(
        r"curl http://127\.0\.0\.1:\d+(/v1/chat/completions .*)",
        why="the server of the page has ended",
        instead=_SERVED.format("outputs/chat") + r"curl -sS http://127.0.0.1:$port\1",
        says=r'"role": ?"assistant"',
    ),
    Instead(
        r"lct get .* --tokenizer-only.*",
        why="it needs the network and a token",
        instead=r"trap 'rm -rf assets' EXIT; rm -rf assets; WARM_SERVERS= HF_HUB_OFFLINE=1 \g<0>",
        code=2,
        says="the Hugging Face hub cannot be reached",
    ),
    Instead(
        r"lct tokenize --hub .*",
        why="it needs the network",
        instead=r"WARM_SERVERS= HF_ENDPOINT=http://hub.invalid \g<0>",
        code=2,
        says="is not found at the Hugging Face hub",
    ),
    *_OF_A_RELEASE,
]


def exception_of(command: str) -> Instead | None:
    """Return the first exception that is about a command, or None if it runs as it stands."""
    return next((exception for exception in EXCEPTIONS if exception.text(command) is not None), None)
