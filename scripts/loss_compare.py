"""Compare the losses of two runs, from a clone: trainer/commands/compare.py, installed or not."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.commands.compare import main

if __name__ == "__main__":
    sys.exit(main())
