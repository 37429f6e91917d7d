"""What a wheel alone must do: its code and data files are there, and a few answers are those of the README."""

import json
import subprocess
import sys
from pathlib import Path

import costgraph as cg

installed = Path(cg.__file__).parent
assert Path.cwd() not in installed.parents, f"{installed} is the checkout, expected the installed wheel"

B, S, D = cg.dims("B S D")
with cg.Graph("scores") as g:
    q, k = g.input("q", (B, S, D)), g.input("k", (B, S, D))
    g.output(cg.softmax(cg.einsum(q, k, "b s d, b t d -> b s t")))
assert cg.flops(g) == 2 * B * D * S**2 + 5 * B * S**2
cg.save(g, "scores.json")
assert cg.peak_memory(cg.load("scores.json"), B=2, S=3, D=5) == 384

llama = cg.models.load("llama-3-8b")
assert (cg.param_count(llama), cg.matmul_flops(llama, B=1, S=8192)) == (8030261248, 140550657277952)
step = cg.training_step(llama, optimizer=cg.AdamW())
assert cg.param_count(step) == 8030261248
# the data files: devices, networks, what was measured
assert [cg.load_hardware(name).name for name in cg.list_hardware()]
lower, calibrated = (cg.seconds(llama, "h100-sxm", which, B=1, S=2048) for which in ("lower", "calibrated"))
assert 0 < lower < calibrated
cg.explore("mlp", "page.html")
assert "<script" in Path("page.html").read_text(encoding="utf-8")


def run(*words: str) -> str:
    """Return what a command prints."""
    command = [sys.executable, "-m", "costgraph", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


assert "llama-3-8b" in run("models")
assert "h100-sxm" in run("hardware")
assert "B*" in run("formula", "mlp", "flops")
assert json.loads(run("report", "gpt2", "--hardware", "h100-sxm", "--json", "-", "B=1", "S=1024"))
print("the wheel works")
