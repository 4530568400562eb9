"""Turn text into files of token ids: for one job, before it starts, or a folder for training.dataset = "tokens".

    lct tokenize my.toml
    lct train my.toml

The first form makes the token files that the first start of the job would make, in the cache. The second form makes a
folder:

    lct tokenize --dataset jsonl --path 'data/*.jsonl' --tokenizer-path assets/tokenizer --output tokens
    lct train --training.dataset tokens --training.dataset_path tokens --model.tokenizer_path assets/tokenizer

The second form reads .jsonl, .jsonl.gz, .jsonl.zst and .parquet files (jsonl), .txt files (text), python_stdlib, or
conversations (chat); or a data set of the Hugging Face hub, streamed:

    lct tokenize --hub allenai/c4 --hub-config en --split train --output tokens

After an interruption, the same command continues: whole shards stay, and missing or damaged shards are made.
"""

import argparse
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from trainer.commands.options import Parser
from trainer.commands.start import parse
from trainer.config.data import CONVERSATIONS
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.data.job_data import all_data
from trainer.data.sources.records import HubData
from trainer.data.sources.registry import DATASETS, HUB, DataSettings
from trainer.data.token_files.catalog import catalog_of
from trainer.data.token_files.inputs import Inputs
from trainer.data.token_files.made import noted, tokenize
from trainer.data.tokenizers.tokenizer import default_tokenizer_path
from trainer.families.registry import from_path
from trainer.runtime.console import set_up_logging
from trainer.runtime.launcher_watch import end_with


def fill_cache(argv: list[str]) -> None:
    """Make the token files of a job that are missing in the cache.

    Args:
        argv: The words of the command line, without the command.
    """
    config = from_path(parse_command_line(parse(argv).arguments).config)
    set_up_logging(0)
    for settings in all_data(config):
        catalog_of(settings)


def into_folder(args: argparse.Namespace) -> None:
    """Make the missing shards of a folder, then its manifest, and print the progress.

    Args:
        args: The options of the command line.

    Raises:
        ConfigError: Two options do not go together, or as for `tokenize`.
        OSError: A file cannot be written.
    """
    if args.processes < 1 or args.shard_mb < 1:
        raise ConfigError(
            f"--processes {args.processes} and --shard-mb {args.shard_mb} must be at least 1; leave them out"
        )
    if args.hub and (args.path or args.dataset not in ("jsonl", *CONVERSATIONS)):
        raise ConfigError(
            f"--hub {args.hub} has its own files and format; leave out --path and --dataset, or "
            f"write --dataset {' or '.join(CONVERSATIONS)} for conversations"
        )
    folder = Path(args.output)
    log = partial(print, flush=True)
    formats = args.chat_template, args.text_field, args.on_bad_record == "skip"
    settings = DataSettings(
        args.dataset, args.path, args.tokenizer_path or default_tokenizer_path(), *formats
    )
    if args.hub:
        data = HubData(args.hub, args.hub_config, args.split, args.hub_revision)
        # An interrupted run has noted its revision; continue with the same one.
        before = HubData.of(noted(folder).get("path", data.path).removeprefix(HUB))
        goes_on = before.revision and replace(before, revision=data.revision) == data
        data = before if goes_on else data.pinned()
        has_messages = args.dataset in CONVERSATIONS
        kind = args.dataset if has_messages else "hub"
        settings = replace(settings, dataset=kind, path=HUB * has_messages + data.path)
        log(f"{data}: {data.shards} shards of revision {data.revision}")
    try:
        tokenize(
            Inputs.of(settings),
            folder,
            processes=args.processes,
            log=log,
            shard_bytes=args.shard_mb << 20,
        )
    except OSError as error:  # of a full disk it has no name
        error.filename = error.filename or args.output
        raise


def main(argv: list[str]) -> int:
    """Run `tokenize [FILE] [--table.key value ...]` for a job, `tokenize --output FOLDER ...` for a folder.

    Args:
        argv: The words of the command line, without the command.

    Returns:
        The exit code.
    """
    if not any(word.partition("=")[0] in ("--output", "-h", "--help") for word in argv):
        fill_cache(argv)
    else:
        into_folder(_parser().parse_args(argv))
    return 0


def _parser() -> Parser:
    parser = Parser("tokenize", __doc__)
    add = parser.add_argument
    kinds = [
        name for name, source in DATASETS.items() if not source.token_files and name != "hub"
    ]
    add("--dataset", default="jsonl", choices=kinds)
    add("--path", help="file, folder or glob of the documents")
    add("--hub", help="data set of the Hugging Face hub, instead of --path")
    add(
        "--hub-config",
        help="configuration of the data set, such as en (default: its own default)",
    )
    add("--hub-revision", help="revision of the data set (default: the newest)")
    add("--split", default="train", help="split of the data set (default: train)")
    add("--output", required=True, help="folder of the token ids")
    add("--tokenizer-path", help="see model.tokenizer_path")
    add("--chat-template", help="see model.chat_template")
    add("--text-field", default="text", help="field or column with the text of a document")
    add(
        "--on-bad-record",
        default="stop",
        choices=("stop", "skip"),
        help="stop, or skip: take an empty document instead (default: stop)",
    )
    add(
        "--processes",
        type=int,
        default=os.cpu_count(),
        help="number of processes; each makes a shard at a time",
    )
    add("--shard-mb", type=int, default=256, help="MiB of input per shard (default: 256)")
    return parser


if __name__ == "__main__":  # as `lct train` starts it
    from trainer.commands.main import main as lct

    end_with(os.getppid())
    sys.exit(lct(["tokenize", *sys.argv[1:]]))
