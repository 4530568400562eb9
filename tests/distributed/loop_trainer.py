"""The trainer that tests of the loop build."""

from tests.distributed import harness
from trainer.config.loader import parse_command_line
from trainer.runtime.process_group import Process


def build(folder: str, *arguments: str):
    process = Process.from_environment()
    config = parse_command_line([*harness.BASE, f"--job.dump_folder={folder}", *arguments]).config
    return process, config, harness.resolved(config, process)
