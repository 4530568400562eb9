"""Download a tokenizer, from a clone: trainer/commands/download_tokenizer.py, installed or not."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.commands.download_tokenizer import main

if __name__ == "__main__":
    sys.exit(main())
