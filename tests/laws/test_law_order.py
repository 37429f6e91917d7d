"""Results do not depend on set order: graphs under several values of PYTHONHASHSEED."""

import json

from algebra import outputs_under_hash_seeds
from budget import examples, without_calls
from hypothesis import HealthCheck, given, settings
from shared import load

from costgraph import testing
from costgraph.testing.properties import saved

CODE = """
import json, sys
from pathlib import Path
import costgraph as cg
from costgraph.testing.properties import loaded, saved
from costgraph.testing.properties import QUESTIONS
for data in json.loads(Path({path!r}).read_text()):
    graph = loaded(data)
    for name, ask in QUESTIONS.items():
        print(name, ask(graph))
    print(cg.timeline(graph).regimes, cg.lifetimes(graph))
    print(cg.fuse(graph).ops, cg.costs(graph).rows)
print(saved(cg.models.load("gpt2")))
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
    (text,) = outputs_under_hash_seeds(CODE.format(path=str(path)))
    *answers, declared = text.splitlines()
    assert "\n".join(answers).count("peak_memory") == len(graphs) > 1
    assert declared == str(saved(load("gpt2")))
