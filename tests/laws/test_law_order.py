"""Nothing depends on the order of a Python set: the same drawn graphs under several values of PYTHONHASHSEED."""

import json

from algebra import outputs_under_hash_seeds
from budget import examples, without_calls
from hypothesis import HealthCheck, given, settings

import costgraph as cg
from costgraph import testing
from costgraph.testing.files import saved

CODE = """
import json, sys
from pathlib import Path
import costgraph as cg
from costgraph.testing.files import loaded
from costgraph.testing.laws import QUESTIONS
for data in json.loads(Path({path!r}).read_text()):
    graph = loaded(data)
    for name, ask in QUESTIONS.items():
        print(name, ask(graph))
    print(cg.timeline(graph).regimes, cg.lifetimes(graph))
    print(cg.fuse(graph).ops, cg.costs(graph).rows)
"""


def test_nothing_depends_on_the_hash_seed(tmp_path):
    graphs = []

    @settings(
        max_examples=examples(40),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=without_calls(testing.graphs(most=8)))
    def draw(case):
        graphs.append(saved(case.graph))

    draw()
    path = tmp_path / "graphs.json"
    path.write_text(json.dumps(graphs))
    outputs = outputs_under_hash_seeds(CODE.format(path=str(path)))
    assert len(outputs) == 1
    assert outputs.pop().count("peak_memory") == len(graphs) >= 40


def test_a_zoo_model_declares_the_same_graph_under_every_hash_seed():
    code = "import costgraph as cg; from costgraph.testing.files import saved; print(saved(cg.models.load('gpt2')))"
    (text,) = outputs_under_hash_seeds(code)
    assert text.strip() == str(saved(cg.models.load("gpt2")))
