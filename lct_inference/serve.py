"""Answer requests in the format of OpenAI's API, with the model of a run or of a Hugging Face folder.

serve outputs/chat
serve ./Qwen3-8B --ngpu 4 --context-parallel 4 --port 8080

Clients find the server at http://127.0.0.1:8000/v1: /chat/completions through the chat template, /completions and
/models. /health says that the server runs. All ranks answer one request after the other. Ctrl-C ends.
"""

import argparse
import json
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from lct_inference.generate import job_of, model_parser
from lct_inference.openai_request import Request
from lct_inference.talk import PATIENCE_SECONDS, Talk, ends_of, talk_options
from trainer.commands.options import Parser, number
from trainer.commands.ranks import run
from trainer.config.errors import ConfigError
from trainer.job import ResolvedJob

if TYPE_CHECKING:
    import torch


def parser() -> Parser:
    """Return the parser of the options."""
    described = model_parser("serve", __doc__)
    add = described.add_argument
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen at; 0.0.0.0 takes requests of other machines (default: 127.0.0.1)",
    )
    add(
        "--port",
        type=number(int, 1, most=65535),
        default=8000,
        help="port to listen at (default: 8000)",
    )
    talk_options(described, tools=False)
    return described


def checked(argv: list[str]) -> tuple[argparse.Namespace, ResolvedJob]:
    """Return the options and the job of all ranks.

    Args:
        argv: The words of the command line, without the command.

    Raises:
        ConfigError: An option is wrong, a package is missing, or the ranks cannot divide the model.
    """
    args = parser().parse_args(argv)
    if missing := [
        package for package in ("starlette", "uvicorn") if find_spec(package) is None
    ]:
        raise ConfigError(
            f"lct serve needs {' and '.join(missing)}; install them with pip install '.[serve]' in the folder of this "
            f"program, or with pip install {' '.join(missing)}"
        )
    return args, job_of(args, command="lct serve")


def talk_of(job: ResolvedJob) -> Talk | ConfigError:
    """Return the chat template, or the error that says why this model has none.

    Without a chat template, the server completes texts only.

    Args:
        job: The resolved job.
    """
    try:
        return Talk.of(job.config)
    except ConfigError as error:
        return error


def work(args: argparse.Namespace, job: ResolvedJob, device: "torch.device") -> str:
    """Answer requests until the process is stopped. A collective over all ranks; rank 0 runs the server.

    Args:
        args: The options of the command line.
        job: The resolved job.
        device: The device of this rank.

    Returns:
        An empty text.
    """
    from lct_inference.answering import Writer
    from lct_inference.http_server import Server, Waiting
    from trainer.commands.finished_run import loaded_model
    from trainer.data.tokenizers.tokenizer import open_tokenizer
    from trainer.runtime.agreement import control_group, raise_on_all_ranks, read_once
    from trainer.runtime.process_group import set_timeout

    tokenizer = open_tokenizer(job.config.model.tokenizer_file)
    talk = talk_of(job)
    ends = talk.ends if isinstance(talk, Talk) else ends_of(job.config, tokenizer)
    model, dims = loaded_model(job, device)
    control = control_group()
    writer = Writer(model, job, dims, tokenizer, ends, control)
    server = (
        Server(args, job.config.training.seq_len, tokenizer, talk) if dims.is_first else None
    )
    raise_on_all_ranks(server.start if server else lambda: None)
    set_timeout(PATIENCE_SECONDS, except_group=control)  # the other ranks wait for a request
    while request := read_once(server.next if server else bytes):
        own = Waiting(Request(**json.loads(request)), lambda _: None)
        writer.answer(server.current if server else own)
    return ""


main = partial(run, __name__)
