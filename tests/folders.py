"""The folders of the tests, which import helpers and each other by name; so do workers. Importing this makes it so."""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parent
FOLDERS = [str(TESTS), *sorted({str(file.parent) for file in TESTS.glob("*/**/test_*.py")})]
# For programs that tests start.
PYTHONPATH = os.pathsep.join([str(TESTS.parent), *FOLDERS])

sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]
