"""Completeness of every op kind: record, semantics, sampling, differentiation and lowering."""

from importlib.util import find_spec
from pathlib import Path

from costgraph import testing
from costgraph.ops.registry import KINDS
from costgraph.transforms.vjp import NOT_DIFFERENTIABLE

#: Parts that a kind lacks, with the reason.
WHY = {
    **{(kind.name, "vjp"): reason for kind, reason in NOT_DIFFERENTIABLE.items()},
    ("kernel", "vjp"): "has a body: its gradient is made of those of its ops",
    ("repeat", "vjp"): "has a body: its gradient is a loop over those of its ops",
    ("repeat", "lowering"): "played out: torch is called for the ops of its iterations",
    ("custom_call", "lowering"): "the call that a trace saw is made again, whatever the kind of its op",
    ("undef", "lowering"): "no value: the walk passes it on",
    **{
        (name, what): "numbers of the interpreter are real: held against torch's in test_trace_complex.py"
        for name in ("fft", "view_as")
        for what in ("reference_semantics", "strategy")
    },
}


def tables():
    """Return the tables that costgraph.torch registers, if torch is installed."""
    if find_spec("torch") is None:
        return {}
    from costgraph.torch.lowering import LOWERINGS

    return {"lowering": LOWERINGS}


def test_every_kind_is_complete_or_states_a_reason():
    also = tables()
    builtin = {name: kind for name, kind in KINDS.items() if kind.__module__.startswith("costgraph.")}
    absent = {(name, what) for name, kind in builtin.items() for what in testing.missing(kind, **also)}
    lacking = [f"{what} of {name}" for name, what in sorted(absent - WHY.keys())]
    assert not lacking, f"missing, and no reason in WHY: {', '.join(lacking)}"
    needless = [f"{what} of {name}" for name, what in sorted(WHY.keys() - absent) if what in also or what != "lowering"]
    assert not needless, f"a reason in WHY, and not missing: {', '.join(needless)}"
    assert all(WHY.values())


def test_kinds_page_names_existing_tests():
    """Each kind has a row, and each cell names an existing test; `kinds_covered` regenerates the page."""
    page = (Path(__file__).parents[1] / "docs" / "accuracy" / "kinds.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    builtin = {name for name, kind in KINDS.items() if kind.__module__.startswith("costgraph.")}
    assert {row[0].strip("`") for row in rows} == builtin
    named = {cell.split("`")[1].split("[")[0] for row in rows for cell in row[1:] if "`" in cell}
    for file, _, function in (name.partition("::") for name in named):
        text = (Path(__file__).parent / file).read_text(encoding="utf-8")
        assert f"def {function}(" in text, f"{file}::{function}"


def test_long_cases_name_existing_tests():
    for case in (Path(__file__).parent / "long_cases.txt").read_text(encoding="utf-8").splitlines():
        file, _, function = case.partition("[")[0].partition("::")
        text = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
        assert f"def {function}(" in text, case
