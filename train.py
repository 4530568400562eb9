"""One rank of a run, alone or under torchrun: `python train.py --job.config_file FILE [--table.key value ...]`."""

import sys

from trainer.installed import check_installed

check_installed(training=True)

from trainer.commands.rank import command_line, main  # noqa: E402

__all__ = ["command_line", "main"]

if __name__ == "__main__":
    sys.exit(command_line())
