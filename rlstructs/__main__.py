"""`python -m rlstructs`: the command `rlstructs`."""

import sys

from rlstructs.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
