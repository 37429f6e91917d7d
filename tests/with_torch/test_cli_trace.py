"""`costgraph trace`: from a factory function to a report and a file."""

import json

import pytest

import costgraph as cg
from costgraph.cli import main

pytest.importorskip("torch.utils.flop_counter")

PROGRAM = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Embedding(97, 30), nn.Linear(30, 7), nn.ReLU())

class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.head = make(), nn.Linear(7, 97)

    def forward(self, ids, targets):
        return nn.functional.cross_entropy(self.head(self.net(ids)).flatten(0, 1), targets.flatten())

def make_step():
    return Step()

def fails():
    raise ValueError("first\\nsecond")

def leaves():
    raise SystemExit(7)

def wants(size):
    return nn.Linear(size, size)

class Square(nn.Module):
    def forward(self, x):
        return x @ x

number = 3

def make_dropout():
    return nn.Dropout()
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def test_traced_module_is_reported_and_saved(program, tmp_path, capsys):
    out = tmp_path / "net.json"
    words = ["trace", f"{program}:make", "--input", "B,S:int64", "--out", str(out), "B=8", "S=5"]
    assert main([*words, "--hardware", "h100-sxm"]) == 0
    shown = capsys.readouterr().out
    assert f"{2 * 8 * 5 * 30 * 7:,} FLOP" in shown  # multiply + add per index point
    B, S = cg.dims("B S")
    assert cg.matmul_flops(cg.load(out)) == 2 * 30 * 7 * B * S
    assert json.loads(out.read_text())["graph"]["schema"] == "costgraph/graph/4"
    assert main(["formula", str(out), "matmul-flops"]) == 0
    assert capsys.readouterr().out.startswith("420*B*S")


def test_a_step_is_traced(program, capsys):
    words = ["trace", f"{program}:make_step", "--input", "B,S:int64", "--input", "targets=B,S:int64", "--train"]
    assert main([*words, "--optimizer", "AdamW:fused", "--formulas"]) == 0
    shown = capsys.readouterr().out
    # forward, and both gradients of both matmuls: the ids need no gradient, the table does
    assert f"{3 * (2 * 30 * 7 + 2 * 7 * 97):_}*B*S" in shown


def test_trace_for_a_gpu_reports_chosen_kernels(program, capsys):
    words = ["trace", f"{program}:make_dropout", "--input", "B,5", "--device", "cuda", "--arch", "sm_80"]
    assert main(words) == 0
    assert "1 call by the rule dropout: one kernel: p = 0.5 in training" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nothing"], "'nothing': expected MODULE:FACTORY, such as models.py:make"),
        (["missing.py:make"], "'missing.py': no such file, expected a file that defines the factory"),
        (
            ["no_such_module:make"],
            "raised \"ModuleNotFoundError: No module named 'no_such_module'\", expected a module",
        ),
        (["{folder}/broken.py:make"], "expected a module that can be imported"),
        (["{program}:fails"], "program.py:20, expected a function without arguments that returns a torch.nn.Module"),
        (["{program}:leaves"], "raised 'SystemExit: 7' at "),
        (["{program}:wants", "--input", "1"], "missing 1 required positional argument: 'size'\", expected a function"),
        (["torch.nn:Linear", "--input", "1"], "'torch.nn:Linear': raised \"TypeError: Linear.__init__() missing 2"),
        (["{program}:Square", "--input", "2,3"], "RuntimeError"),
        (["{program}:number"], "it has no function 'number', expected a function without arguments"),
        (["{program}:make", "--input", "B,-3"], "--input 'B,-3': expected [NAME=]SIZES[:FORMAT], such as B,S:int64"),
        (["{program}:make", "--input", "B,S:text"], "dtype 'text' of an input: expected one that torch has"),
        (["{program}:make", "--input", "B:int64", "--optimizer", "Adamant"], "--optimizer 'Adamant': expected one of"),
        (["{program}:make", "--input", "B:int64", "--optimizer", "SGD:slow"], "expected for-loop, foreach or fused"),
        (["{program}:make", "--input", "B:int64", "--optimizer", "SGD"], "an optimizer requires train=True"),
        (["{program}:make", "--fold", "blocks"], "--fold 'blocks': expected SCOPE=NAME, such as transformer/h=L"),
        (["{program}:make", "--out", "graph.txt"], "--out 'graph.txt': expected a name ending in .json"),
        (["{program}:make", "--input", "B,S:int64", "--unknown", "zero"], "unknown"),
        (
            ["{program}:make", "--input", "B,S:int64", "--device", "tpu"],
            "trace: device 'tpu', expected one of cpu, cuda",
        ),
        (["{program}:make", "--input", "B,S:int64", "--device", "cuda", "--arch", "90"], "trace: arch '90', expected"),
    ],
)
def test_invalid_trace_commands_are_refused(program, words, text, capsys, tmp_path):
    (tmp_path / "broken.py").write_text("import json\njson.loads('{')\n")
    assert main(["trace", *(w.format(program=program, folder=tmp_path) for w in words)]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert shown.startswith("costgraph: ")
    assert text in shown
