"""`python -m trainer COMMAND ...` is `lct COMMAND ...`."""

import sys

from trainer.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
