"""The documentation notebooks run, and their results agree with independent counts."""

import ast
import itertools
import json
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from shared import load

import costgraph as cg

NOTEBOOKS = {p.stem: p for p in sorted((Path(__file__).resolve().parent.parent / "docs" / "notebooks").glob("*.md"))}
NEEDED = ("myst_nb", "nbclient", "ipykernel", "matplotlib", "xarray")
pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in NEEDED), reason="needs costgraph[docs]: myst-nb runs the notebooks"
)


#: Runs in a subprocess, which closes everything the client leaves open. No port is opened.
RUN = """
import json, sys
from jupyter_client.manager import AsyncKernelManager
from myst_nb.core.read import read_myst_markdown_notebook
from nbclient import NotebookClient

notebook = read_myst_markdown_notebook(open(sys.argv[1], encoding="utf-8").read())
NotebookClient(notebook, km=AsyncKernelManager(kernel_name="python3", transport="ipc"), timeout=300).execute()
print(json.dumps([cell for cell in notebook.cells if cell.cell_type == "code"]))
"""


@cache
def run(name):
    """Return the cells of an executed notebook."""
    command = [sys.executable, "-c", RUN, NOTEBOOKS[name]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def shown(name, ending):
    """Return the output text of the only cell whose source ends with the given text."""
    (cell,) = (c for c in run(name) if c["source"].rstrip().endswith(ending))
    return "".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in cell["outputs"])


def multiplied(*axes):
    """Return the FLOPs of a product: one multiplication and one addition per index point."""
    return 2 * sum(1 for _ in itertools.product(*map(range, axes)))


def test_documentation_has_three_notebooks():
    assert sorted(NOTEBOOKS) == ["architecture", "fit", "sweep"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs_and_shows_figures(name):
    outputs = [o for cell in run(name) for o in cell["outputs"]]
    assert {o["output_type"] for o in outputs} <= {"execute_result", "display_data", "stream"}
    assert {o["name"] for o in outputs if o["output_type"] == "stream"} <= {"stdout"}
    assert sum("image/png" in o.get("data", {}) for o in outputs) == 2


def test_new_architecture_flops_match_explicit_loops():
    B, S, C, D, H, F, L, V = 2, 15, 5, 6, 3, 7, 2, 31
    marks, width = S // C, D // H
    projections = multiplied(B, S, H, width, D) * 2 + multiplied(B, marks, H, width, D) * 2
    layer = projections + 2 * multiplied(B, H, S, marks, width) + 3 * multiplied(B, S, F, D)
    matmul, _ = ast.literal_eval(shown("architecture", "counted.matmul, int(counted.peak)"))
    assert matmul == L * layer + multiplied(B, S, V, D)
    assert shown("architecture", "cg.peak_memory(g, **small)") == shown("architecture", "int(counted.peak)")


def test_training_state_matches_published_parameter_count():
    # 8,030,261,248 parameters, each with a bf16 gradient and two fp32 moments
    last = shown("fit", 'are state")').splitlines()[-1]
    assert float(last.split()[0]) == round(8_030_261_248 * (2 + 2 + 4 + 4) / 1e9, 1)


def test_largest_batch_just_fits_device_memory():
    batch, fits, _, over, capacity = (
        int("".join(filter(str.isdigit, word)))
        for word in shown("fit", 'capacity {capacity:,}")').replace(";", "").replace("B=", " ").split()
        if any(map(str.isdigit, word))
    )
    assert fits <= capacity < over
    assert batch % 8 == 0


def test_fitting_batches_match_trial_and_error():
    step = cg.decode(load("llama-3-8b"))
    for line in shown("sweep", 'B <= {int(found.B.where(fits).max())}")').splitlines():
        name, _, _, batch = line.split()
        room = cg.load_hardware(name).capacity().value
        tried = [2**n for n in range(11) if cg.peak_memory(step, B=2**n, S=8192) <= room]
        assert int(batch) == max(tried)


def test_sweep_grid_matches_numpy():
    size, span = ast.literal_eval(shown("sweep", 'float(grid.max()) / 1e9:.1f} GB"'))
    weights = 8_030_261_248 * 2 + 256  # plus the rotary angle table
    assert size == 1000**2
    assert np.all(np.array(span.split())[[0, 2]].astype(float) * 1e9 > weights)
