"""Every table that shows symbols ends with their legend: exactly the shown symbols that the graph describes."""

import html
import importlib
import inspect
import pkgutil
import re

import pytest
from shared import load, parallelize, training_step

import costgraph as cg
from costgraph import cli
from costgraph.cli.registry import COMMANDS
from costgraph.hardware.tables import Table
from costgraph.report.rich_tables import draw

MODELS = ("gpt2", "llama-3-8b", "mixtral-8x7b")

RESULTS = {
    "Costs": lambda name: cg.costs(load(name, symbolic=True)),
    "Grouped": lambda name: cg.costs(load(name)).group("scope"),
    "Communication": lambda name: cg.communication(parallelize(load(name, symbolic=True), tp=2)),
    "Comparison": lambda name: cg.compare(load(name), load("mlp", symbolic=True)),
    "Lifetimes": lambda name: cg.lifetimes(load(name)),
    "Timeline": lambda name: cg.timeline(load(name, symbolic=True)),
    "Roofline": lambda name: cg.roofline(load(name), "h100-sxm", S=128),
    "Throughput": lambda name: cg.plan.throughput(cg.decode(load(name)), "h200-sxm", "B", [1, 2], S=128),
    "Crossovers": lambda name: cg.plan.crossovers(
        cg.plan.search(
            load("gpt2"), devices=1, hardware="h100-sxm", precision="bf16", B=8, S=128, checkpoint="none", accumulate=1
        ),
        "S", (128, 256), multiple_of=128,
    ),
    "Graph": lambda name: load(name, symbolic=True),
    "Report": lambda name: cg.report(load(name, symbolic=True)),
    "Preflight": lambda name: cg.plan.preflight(training_step(load(name)), "h100-sxm", S=128),
}  # fmt: skip
#: Tables without dimensions.
NUMBERS = {"Network", "Hardware", "Weights", "WeightComparison", "Search", "Held", "Validation"}

LINES = {
    "report": ["report MODEL", "report MODEL --symbolic --formulas", "report MODEL --hardware h100-sxm S=128"],
    "crossover": ["crossover gpt2 B --hardware h100-sxm"],
    "train": ["train mixtral-8x7b --hardware h100-sxm --tp T", "train gpt2 --formulas B=1 S=128"],
    "plan": ["plan MODEL --hardware h100-sxm S=128"],
    "decode": ["decode MODEL --hardware h200-sxm --values 1,2 S=128"],
}
#: Commands that show no formulas, or only names of dimensions without sizes; `formula` has a legend on terminals only.
OTHERS = {"formula", "models", "hardware", "explore", "search", "latency", "calibrate", "validate", "trace", "weights"}


def subclasses(kind):
    return {c for direct in kind.__subclasses__() for c in (direct, *subclasses(direct))}


def assert_legend(text, descriptions):
    """Compare the legend of a text with the symbols in its formulas, found without knowledge of their values."""
    legends = r"^symbols  .*(?:(?<=,)\n .*)*"
    lines = [line.strip() for legend in re.findall(legends, text, re.MULTILINE) for line in legend[7:].splitlines()]
    body = re.sub(legends, "", text, flags=re.MULTILINE)
    body = re.sub(r"\[[^\]]*\]", "", body)  # units in brackets, and indices
    body = re.sub(r"\w\w+(/\w+)+", "", body)  # names of ops
    body = re.sub(r"^[\w-]+: \d+ ops|(sizes|preset|unbound) .*|\w+=\d+", "", body, flags=re.MULTILINE)
    body = re.sub(r"\d B\b|(?<= )(FLOP|B)   (?=\S*[\d*])", "", body)  # units
    shown = {*re.findall(r"[A-Za-z_]\w*", body)} & descriptions.keys()
    entries = [entry for line in lines for entry in line.rstrip(",").split(", ")]
    assert {*entries} == {f"{name} {descriptions[name]}" for name in shown}
    return shown


@pytest.mark.parametrize("name", RESULTS)
def test_results_end_with_the_legend_of_their_symbols(name):
    for model in MODELS if name != "Crossovers" else MODELS[:1]:
        result = RESULTS[name](model)
        assert type(result).__name__ == name
        descriptions = dict(result.legend)
        assert descriptions
        names = assert_legend(str(result), descriptions)
        assert names
        if hasattr(result, "_repr_html_"):
            page = html.unescape(result._repr_html_())
            assert all(f"{name} {descriptions[name]}" in page for name in names)


def test_bound_results_have_no_legend():
    g = load("gpt2")
    for result in (cg.costs(g, B=1, S=2), cg.timeline(g, B=1, S=2), cg.report(g, B=1, S=2), cg.compare(g, g, B=1, S=2)):
        assert "symbols" not in str(result)


@pytest.mark.parametrize("command", LINES)
def test_commands_end_with_the_legend_of_their_symbols(capsys, command):
    for line in LINES[command]:
        for model in MODELS if "MODEL" in line else [line.split()[1]]:
            assert cli.main(line.replace("MODEL", model).split()) == 0
            legend = load(model, symbolic=True).legend | {"T": "tensor-parallel ranks"}
            text = capsys.readouterr().out
            assert text
            assert_legend(text, legend)


def test_every_table_and_command_is_covered():
    for module in pkgutil.walk_packages(cg.__path__, "costgraph."):
        if not module.name.endswith("__main__") and ".torch." not in module.name:
            importlib.import_module(module.name)
    tables = {c.__name__ for c in subclasses(Table) if c.__module__.startswith("costgraph.")}
    assert tables - {"Validation"} == tables & RESULTS.keys() | NUMBERS - {"Validation"}
    assert {*COMMANDS} == LINES.keys() | OTHERS
    # reports are drawn by one function, which asks for the legend
    assert inspect.signature(draw).parameters["legend"].default is inspect.Parameter.empty


def test_undescribed_symbols_are_left_out_and_legends_are_carried(tmp_path):
    B, D, n = cg.dims("B D n")
    with cg.Graph("user") as g:
        g.output(cg.relu(cg.linear(g.input("x", (B, D)), "b d -> b f", f=n, name="up")))
    assert "symbols" not in str(cg.costs(g))
    g.legend = {"B": "rows", "D": "two\nlines \x1b[31m", "V": "unused"}
    assert str(g).splitlines()[-1] == r"symbols  B rows, D two lines \x1b[31m"
    assert cg.training_step(g, "mean_squared_error").legend == g.legend
    cg.save(g, tmp_path / "g.json")
    assert cg.load(tmp_path / "g.json").legend == g.legend
    with pytest.raises(cg.GraphError, match="legend is"):
        g.legend = {"B": 1}


def test_truncated_formulas_end_between_symbols():
    names = cg.dims(" ".join(f"size_{i}" for i in range(20)))
    with cg.Graph("wide") as g:
        g.output(cg.relu(g.input("x", (sum(names),))))
    g.legend = {str(n): f"part {n}" for n in names}
    cells = re.findall(r"  (\d\*\S.*?)\.\.\.", str(cg.lifetimes(g)))
    assert cells
    assert all(name in g.legend for cell in cells for name in re.findall(r"[a-z]\w*", cell))
