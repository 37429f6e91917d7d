"""Aliases from other libraries, and the members and tables that a graph exposes."""

import pytest
from each import each
from shared import load, parallelize, training_step

import costgraph as cg
from costgraph.ir.graph import SIZE_ALIASES
from costgraph.notation.validation import RENAMED_KEYWORDS
from costgraph.optimizers import OPTIMIZERS


@each("alias", sorted(SIZE_ALIASES))
def test_size_alias_binds_size(alias):
    graph, name = load("gpt2"), SIZE_ALIASES[alias]
    other = {"S": 128} if name == "B" else {"B": 2}
    for question in (cg.flops, cg.peak_memory, cg.bytes_moved):
        assert question(graph, **other, **{alias: 16}) == question(graph, **other, **{name: 16})


def test_size_alias_works_for_pipeline_stages():
    step = training_step(load("gpt2"), accumulate=2)
    stages = parallelize(step, pp=2, micro_batches=2)
    assert cg.peak_memory(stages, batch=4, seq_len=64) == cg.peak_memory(stages, B=4, S=64)


def test_two_aliases_for_one_size_are_refused():
    with pytest.raises(cg.BindingError, match="flops: batch and B are two names of one size"):
        cg.flops(load("gpt2"), batch=2, B=2)


def test_graph_dimension_takes_precedence_over_alias():
    batch, B = cg.dims("batch B")
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (batch, B))))
    assert cg.flops(g, batch=2, B=3) == 6
    with pytest.raises(cg.BindingError, match="'seq_len' is not a dimension"):
        cg.flops(g, seq_len=2)


RENAMED_CALLS = {
    "composed": lambda **earlier: cg.models.load("gpt2", **earlier),
    "hold": lambda **earlier: cg.parallelize(training_step(load("llama-3-8b")), tp=2, sequence=True, **earlier),
    "reduce_each": lambda **earlier: cg.parallelize(training_step(load("gpt2"), accumulate=2), dp=2, **earlier),
    "virtual": lambda **earlier: cg.plan.bubble("interleaved", 2, 4, **earlier),
}


def test_every_renamed_keyword_has_a_call():
    assert RENAMED_CALLS.keys() == RENAMED_KEYWORDS.keys()


@each("earlier", sorted(RENAMED_KEYWORDS))
def test_earlier_keywords_warn_and_have_the_same_effect(earlier):
    call, new = RENAMED_CALLS[earlier], RENAMED_KEYWORDS[earlier]
    value = 3 if earlier == "virtual" else True
    with pytest.warns(DeprecationWarning, match=f"{earlier}= is now {new}="):
        answer = call(**{earlier: value})
    expected = call(**{new: value})
    if isinstance(answer, cg.Graph):
        answer, expected = ((cg.bytes_moved(graph), cg.peak_memory(graph, B=2, S=64)) for graph in (answer, expected))
    assert answer == expected
    with pytest.raises(cg.GraphError, match=f"{earlier} and {new} are two names of one argument"):
        call(**{earlier: value, new: value})


@each("name", sorted(OPTIMIZERS))
def test_optimizer_is_accepted_by_name_and_class(name):
    kind = OPTIMIZERS[name]
    expected = cg.state_bytes(cg.training_step(load("gpt2"), optimizer=kind()))
    for given in (name, name.upper(), kind):
        assert cg.state_bytes(cg.training_step(load("gpt2"), optimizer=given)) == expected


@each("given", ["adamx", "", int, cg.Graph, 3])
def test_other_optimizers_are_refused(given):
    with pytest.raises(cg.GraphError, match="training_step: optimizer"):
        cg.training_step(load("gpt2"), optimizer=given)


@each(("given", "policy"), [(True, cg.every_block()), (False, None)])
def test_checkpointing_can_be_switched_on_and_off(given, policy):
    sizes = {"B": 2, "S": 64}
    expected = cg.peak_memory(cg.training_step(load("gpt2"), checkpoint=policy), **sizes)
    assert cg.peak_memory(cg.training_step(load("gpt2"), checkpoint=given), **sizes) == expected


def test_dir_lists_model_members():
    graph = load("gpt2")
    names = dir(graph)
    assert {"inputs", "outputs", "params", "ops", "tensors", "defaults", "nodes", "edges"} <= set(names)
    assert [n for n in names if not hasattr(graph, n) or n.startswith("_")] == []
    assert graph.in_degree(graph.outputs[0]) == 1  # networkx methods still work


def test_notebook_shows_same_table_as_print():
    graph = load("gpt2")
    title, head, *rows = str(graph).splitlines()
    page = graph._repr_html_()
    assert page.startswith(f"<table><caption>{title}</caption><tr>")
    assert page.count("<tr>") == 1 + len(rows)
    assert all(f">{cell.strip()}<" in page for cell in head.split("  ") if cell.strip())
    with cg.Graph("<a & b>") as odd:
        assert odd._repr_html_().startswith(("<pre>Graph(&#x27;&lt;a &amp; b&gt;", "<table><caption>&lt;a &amp; b&gt;"))


@pytest.mark.parametrize(("earlier", "new"), [("grouped", "grouped_matmul"), ("keep", "keep_alive")])
def test_earlier_op_functions_warn(earlier, new):
    with pytest.warns(DeprecationWarning, match=f"ops.{earlier} is now ops.{new}"):
        assert getattr(cg.ops, earlier) is getattr(cg.ops, new)
