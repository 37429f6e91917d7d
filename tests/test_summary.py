"""The table of scopes that `print(graph)` shows."""

import re

import networkx as nx
import pytest
from shared import load, training_step

import costgraph as cg


def rows_of(graph):
    header, columns, *rows = str(graph).partition("\nsymbols ")[0].split("\n")
    assert header.startswith(f"{graph.name}: ")
    assert columns.split() == ["scope", "output", "shape", "parameters", "FLOPs"]
    return [re.split(r"\s{2,}", row) for row in rows]


@pytest.mark.parametrize(
    "name", ["llama-3-8b", "resnet18", pytest.param("mixtral-8x7b", marks=pytest.mark.long), "mlp"]
)
def test_summary_rows_add_up_to_graph_totals(name):
    graph = load(name)
    for each in (graph, training_step(graph)):
        *rows, total = rows_of(each)
        if isinstance(cg.param_count(each), int):
            counts = [int(row[-2].replace(",", "")) for row in rows]
            assert sum(counts) == int(total[1].replace(",", "")) == cg.param_count(each)
        assert total[-1].replace(",", "").replace(" ", "") == str(cg.flops(each)).replace(" ", "")
        assert len(rows) <= 41


def test_unrolled_graph_summary_has_at_most_40_rows():
    graph = cg.unroll(load("gpt2", symbolic=False), L=12)
    assert len(rows_of(graph)) <= 42


def test_unfinished_graph_can_be_printed():
    with cg.Graph("g") as g:
        x = g.input("x", (2, 3))
        y = g.input("y", (3,))
        assert "g: 0 ops" in str(g)
        g.output(cg.relu(x))
    assert g.inputs == [x, y]
    assert str(nx.DiGraph(g)).startswith("DiGraph named 'g'")
