"""The notebooks of the documentation run, and what they show is what others count."""

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


#: A process of its own: what the client leaves open is closed with it. No port is opened.
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
    """Cells of a notebook that has run."""
    command = [sys.executable, "-c", RUN, NOTEBOOKS[name]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def shown(name, ending):
    """Text of what the only cell with an ending shows or prints."""
    (cell,) = (c for c in run(name) if c["source"].rstrip().endswith(ending))
    return "".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in cell["outputs"])


def multiplied(*axes):
    """FLOPs of a product, one multiplication and one addition for each index."""
    return 2 * sum(1 for _ in itertools.product(*map(range, axes)))


def test_there_are_three():
    assert sorted(NOTEBOOKS) == ["architecture", "fit", "sweep"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_and_shows_pictures(name):
    outputs = [o for cell in run(name) for o in cell["outputs"]]
    assert {o["output_type"] for o in outputs} <= {"execute_result", "display_data", "stream"}
    assert {o["name"] for o in outputs if o["output_type"] == "stream"} <= {"stdout"}
    assert sum("image/png" in o.get("data", {}) for o in outputs) == 2


def test_products_of_the_new_architecture_are_those_that_loops_do():
    B, S, C, D, H, F, L, V = 2, 15, 5, 6, 3, 7, 2, 31
    marks, width = S // C, D // H
    projections = multiplied(B, S, H, width, D) * 2 + multiplied(B, marks, H, width, D) * 2
    layer = projections + 2 * multiplied(B, H, S, marks, width) + 3 * multiplied(B, S, F, D)
    matmul, _ = ast.literal_eval(shown("architecture", "counted.matmul, int(counted.peak)"))
    assert matmul == L * layer + multiplied(B, S, V, D)
    assert shown("architecture", "cg.peak_memory(g, **small)") == shown("architecture", "int(counted.peak)")


def test_the_state_that_is_shown_is_that_of_a_published_count():
    # 8,030,261,248 parameters, each with its gradient in bf16 and two moments in fp32
    last = shown("fit", 'are state")').splitlines()[-1]
    assert float(last.split()[0]) == round(8_030_261_248 * (2 + 2 + 4 + 4) / 1e9, 1)


def test_the_largest_batch_is_next_to_the_capacity():
    batch, fits, _, over, capacity = (
        int("".join(filter(str.isdigit, word)))
        for word in shown("fit", 'capacity {capacity:,}")').replace(";", "").replace("B=", " ").split()
        if any(map(str.isdigit, word))
    )
    assert fits <= capacity < over
    assert batch % 8 == 0


def test_batches_that_fit_are_found_by_trying():
    step = cg.decode(load("llama-3-8b"))
    for line in shown("sweep", 'B <= {int(found.B.where(fits).max())}")').splitlines():
        name, _, _, batch = line.split()
        room = cg.load_hardware(name).capacity().value
        tried = [2**n for n in range(11) if cg.peak_memory(step, B=2**n, S=8192) <= room]
        assert int(batch) == max(tried)


def test_the_grid_is_that_of_numpy():
    size, span = ast.literal_eval(shown("sweep", 'float(grid.max()) / 1e9:.1f} GB"'))
    weights = 8_030_261_248 * 2 + 256  # and the table of angles
    assert size == 1000**2
    assert np.all(np.array(span.split())[[0, 2]].astype(float) * 1e9 > weights)
