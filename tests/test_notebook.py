"""The notebook of the examples runs, and prints what is saved in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import LIMIT

NOTEBOOK = Path(__file__).parent.parent / "examples" / "first.ipynb"


def printed(notebook):
    """What each cell prints, without pictures."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [[output.text for output in cell.outputs if output.output_type == "stream"] for cell in cells]


def test_the_notebook_prints_what_is_saved_in_it(subprocess_env, tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name, value in subprocess_env.items():
        monkeypatch.setenv(name, value)
    saved, notebook = (nbformat.read(NOTEBOOK, as_version=4) for _ in range(2))
    nbclient.NotebookClient(
        notebook, timeout=LIMIT, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    assert printed(notebook) == printed(saved)
    assert "mean return" in str(printed(saved))
