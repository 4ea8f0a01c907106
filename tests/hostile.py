"""What the tests of files from strangers share."""

from __future__ import annotations

import tracemalloc

import pytest

from rlstructs import FileError

# Headers of files: of no array, and of one.
HEAD = {"format": "rlstructs", "version": 1, "class": "DictTensor", "arrays": {}}
SPEC = {"dtype": "float32", "shape": [3]}
GOOD = HEAD | {"arrays": {"x": SPEC}}


def refused(load, path, message=None):
    """The file is refused by an error that names it, for little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(FileError, match=message) as caught:
            load(path)
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()
    assert str(path.parent) in str(caught.value) and len(str(caught.value)) < 2000
    return str(caught.value)
