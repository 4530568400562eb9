"""Show a plan of context parallelism, from a clone: trainer/commands/plan.py, installed or not."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.commands.plan import main

if __name__ == "__main__":
    sys.exit(main())
