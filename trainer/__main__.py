"""`python -m trainer`: the program `lct` from a clone."""

import sys

from trainer.installed import check_installed

if __name__ == "__main__":
    check_installed(training=sys.argv[1:2] == ["train"])
    from trainer.commands.main import main

    sys.exit(main())
