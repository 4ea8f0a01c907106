"""`python -m rlstructs.cli`: the command `rlstructs`."""

import sys

from rlstructs.cli.command import main

sys.exit(main())
