"""Defects found by fuzzing, with their inputs."""

import json

import pytest
from damage import changed, saved
from hostile import nested
from limits import limited

import costgraph as cg
from costgraph.hardware import units
from costgraph.notation.grammar import parse_formula

B, S, D, H, K, L = cg.dims("B S D H K L")
HUGE = 10**5000


def damaged(folder, name, route, value):
    path = folder / "f.json"
    path.write_text(json.dumps(changed(saved(name, folder), route, "replace", value)))
    return path


def op(folder, name, kind):
    return next(i for i, n in enumerate(saved(name, folder)["nodes"]) if n.get("kind") == kind)


# -- integers too long for Python to print -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: cg.flops(cg.models.load("mlp"), B=-HUGE), cg.BindingError, "B=an integer of 16610 bits"),
        (lambda: cg.flops(cg.models.load("mlp"), B=HUGE), cg.BindingError, "of at most 1024 bits"),
        (lambda: cg.Graph("g").input("x", (-HUGE,)), cg.ShapeError, "an integer of 16610 bits, expected a positive"),
        (lambda: cg.dims(HUGE), cg.PatternError, "got an integer of 16610 bits"),
        (lambda: cg.dims([HUGE]), cg.PatternError, "a list too large to be shown"),
        (lambda: parse_formula([HUGE]), cg.PatternError, "a list too large to be shown"),
        (lambda: cg.dtype(HUGE), cg.FormatError, "an integer of 16610 bits"),
        (lambda: cg.models.load(HUGE), cg.GraphError, "an integer of 16610 bits"),
        (lambda: cg.models.load("gpt2", attention=HUGE), cg.GraphError, "an integer of 16610 bits"),
        (lambda: cg.load_hardware([HUGE]), cg.SpecError, "a list too large to be shown"),
        (lambda: units.quantity(HUGE, "no unit"), cg.SpecError, "of value an integer of 16610 bits is unknown"),
        (lambda: units.exact([HUGE]), cg.SpecError, "a list too large to be shown"),
        (lambda: cg.load(nested(10**4)), cg.FormatError, "a list too large to be shown"),
        (lambda: cg.load_hardware("h100-sxm").link(bytearray(b"1")), cg.SpecError, "is unknown"),
    ],
)
def test_unprintable_integers_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


# -- formulas ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["(A+B+C+D)**64", "(A+B+C+D)**40", "*".join(f"(A{i}+1)" for i in range(16))])
def test_long_sums_are_refused_before_expansion(text):
    with limited(), pytest.raises(cg.PatternError, match="too large to be written out"):
        parse_formula(text)


def test_many_terms_in_a_ceiling_are_refused():
    with pytest.raises(cg.PatternError, match="terms in ceiling, expected at most 200"):
        parse_formula("ceiling((A+B+C)**30/7)")


@pytest.mark.parametrize("text", ["(2 / B) / (1 - A)", "1 / (1 / (1 + A))", "3 / (0.5 / (B - 0.5))", "1/(1-A)"])
def test_printed_quotients_parse_to_the_same_formula(text):
    formula = parse_formula(text)
    assert parse_formula(str(formula)) == formula


def test_huge_power_in_a_maximum_is_refused_when_bound():
    formula = parse_formula("Max(A, 7**(B**40))").expr
    with pytest.raises(cg.BindingError, match="is no size of a tensor"):
        cg.evaluate(formula, A=3, B=3)


@pytest.mark.parametrize("size", [-B, -B * S - 1, 1 - B])
def test_sizes_always_below_one_are_refused(size):
    with pytest.raises(cg.ShapeError, match="expected a positive integer"):
        cg.Graph("g").input("x", (size,))


# -- graphs --------------------------------------------------------------------------------------------------------


def test_graphs_with_required_assumptions_are_loaded(tmp_path):
    with cg.Graph("g") as g:
        g.assume("D == H*K")
        g.output(cg.einsum(g.input("x", (B, D)), g.param("w", (H * K, S)), "b d, d s -> b s"))
    cg.save(g, tmp_path / "g.json")
    assert cg.flops(cg.load(tmp_path / "g.json")) == cg.flops(g)


def test_infinite_attributes_survive_save_and_load(tmp_path):
    with cg.Graph("g") as g:
        x = g.input("x", (B, S))
        g.output(cg.ops.pointwise("maximum", x, float("-inf")))
    cg.save(g, tmp_path / "g.json")
    json.loads((tmp_path / "g.json").read_text(), parse_constant=pytest.fail)
    assert cg.flops(cg.load(tmp_path / "g.json")) == B * S


@pytest.mark.parametrize("size", ["0", "-5", "1/2", "0 - D"])
def test_invalid_input_sizes_are_refused(tmp_path, size):
    path = damaged(tmp_path, "dense", ("nodes", 0, "shape", 0), size)
    with pytest.raises(cg.FormatError, match=r"input 'x': axis 0: .*, expected a positive integer"):
        cg.load(path)


@pytest.mark.parametrize(
    ("name", "kind", "attribute", "value", "text"),
    [
        ("dense", "rearrange", "order", {"tuple": [0, 0, 0, 0]}, "order"),
        ("dense", "rearrange", "copy", "yes", "attribute 'copy' of 'rearrange' is 'yes', expected True, or nothing"),
        ("dense", "slice", "room", {"size": "5"}, "room '5'"),
        ("dense", "slice", "axis", -1, "expected an integer of at least 0"),
        ("dense", "expand", "kept", {"tuple": [0, 0, 2, None]}, "kept"),
        ("dense", "concat", "axis", 9, "axis 9"),
        ("dense", "reduce", "operation", "median", "expected one of sum, mean"),
        ("varied", "einsum", "body", {"size": "1"}, "unknown attribute 'body' of 'einsum', expected one of"),
        ("varied", "einsum", "extents", {"dict": {"b": {"size": "B"}}}, "extents of 'b'"),
        ("varied", "scatter", "mode", "ad", "expected one of add, set, max"),
        ("varied", "gather", "batch", -1, "expected an integer of at least 0"),
        ("varied", "scatter", "inplace", 1, "expected True, or nothing"),
        ("varied", "opaque", "pointwise", {"size": "-T"}, "expected an amount that is not negative"),
        ("varied", "opaque", "workspace", 7, "expected an amount that is not negative"),
        ("varied", "collective", "ranks", {"size": "0"}, "expected a positive size"),
        ("varied", "dropout", "p", 1.5, "expected a number between 0 and 1"),
        ("looped", "repeat", "count", {"size": "1/2"}, "expected a positive size"),
        ("looped", "repeat", "count", {"size": "-L"}, "expected a positive size"),
        ("looped", "repeat", "xs", 5, "carries and 5 slices"),
    ],
)
def test_attributes_that_mismatch_operands_are_refused(tmp_path, name, kind, attribute, value, text):
    path = damaged(tmp_path, name, ("nodes", op(tmp_path, name, kind), "attrs", attribute), value)
    with pytest.raises(cg.FormatError) as caught:
        cg.load(path)
    assert "are malformed" in str(caught.value)
    assert text in str(caught.value)


def test_stated_einsum_flops_are_checked(tmp_path):
    i = next(i for i, n in enumerate(saved("varied", tmp_path)["nodes"]) if "orders" in n.get("attrs", {}))
    path = damaged(tmp_path, "varied", ("nodes", i, "attrs", "orders"), {"size": "1"})
    with pytest.raises(cg.FormatError, match="orders '1': does not match the operands"):
        cg.load(path)


@pytest.mark.parametrize(
    ("route", "value", "text"),
    [
        (("directed",), False, "unsupported kind of graph"),
        (("graph", "loss"), 3, "3, expected str"),
        (("graph", "defaults"), {"no name": 3}, "default 'no name', expected the name of a dimension"),
        (("nodes", 0, "type"), "input", "type 'input', expected 'op' or 'tensor'"),
        (("nodes", 0, "id"), "x y", "name 'x y', expected text without spaces"),
        (("nodes", 3, "phase"), "later", "phase 'later', expected one of forward"),
        (("nodes", 3, "dtype"), "fp64", "phase"),
    ],
)
def test_contents_never_saved_are_refused(tmp_path, route, value, text):
    data = saved("dense", tmp_path)
    node = next(i for i, n in enumerate(data["nodes"]) if n["type"] == "op")
    route = tuple(node if k == 3 and route[-1] == "phase" else k for k in route)
    if route[-1] == "dtype":
        route = ("nodes", next(i for i, n in enumerate(data["nodes"]) if n.get("role") == "result"), "dtype")
        text = "has format 'fp64', expected 'bf16'"
    path = damaged(tmp_path, "dense", route, value)
    with pytest.raises(cg.FormatError) as caught:
        cg.load(path)
    assert text in str(caught.value)


def test_tensor_without_producer_is_refused(tmp_path):
    data = saved("dense", tmp_path)
    data["nodes"].append({"id": "ghost", "type": "tensor", "role": "result", "shape": ["B"], "dtype": "fp32"})
    path = tmp_path / "f.json"
    path.write_text(json.dumps(data))
    with pytest.raises(cg.FormatError, match="tensor 'ghost' is not the result of an op"):
        cg.load(path)


def test_duplicate_keys_are_refused(tmp_path):
    path = tmp_path / "f.json"
    saved("dense", tmp_path)
    path.write_text((tmp_path / "dense.json").read_text().replace('"loss": null', '"loss": null, "loss": "x"', 1))
    with pytest.raises(cg.FormatError, match="key 'loss' twice in one object"):
        cg.load(path)


def test_nested_repeats_are_bounded(tmp_path):
    def nest(level):
        if level == 0:
            return cg.relu
        inner = nest(level - 1)
        return lambda x: cg.repeat(L, inner, cg.relu(x), name=f"r{level}")

    with cg.Graph("g") as g:
        g.output(nest(9)(g.input("x", (B, D))))
    cg.save(g, tmp_path / "g.json")
    with pytest.raises(cg.FormatError, match="too many nested repeats, expected at most 8 levels"):
        cg.load(tmp_path / "g.json")


def test_endless_files_are_refused():
    with pytest.raises(cg.FormatError, match="no regular file"):
        cg.load("/dev/zero")


def test_graphs_load_inside_an_open_scope(tmp_path):
    data = saved("dense", tmp_path)
    with cg.Graph("outer"), cg.scope("inside"):
        assert len(cg.load(tmp_path / "dense.json").nodes) == len(data["nodes"])


# -- devices -------------------------------------------------------------------------------------------------------


def test_keys_with_many_dots_are_refused_in_time(tmp_path):
    path = tmp_path / "f.toml"
    path.write_text("a." * 10**5 + "b = 1")
    with limited(), pytest.raises(cg.SpecError, match="a line with more than 1000 dots"):
        cg.load_hardware(path)


@pytest.mark.parametrize("value", ["1e-400", "1e61"])
def test_rates_beyond_float_range_are_refused(tmp_path, value):
    path = tmp_path / "f.toml"
    bytes_, source = 'unit = "B", source = ["A"] }', 'unit = "B/s", source = ["A"] }'
    memory = f"[memory]\ncapacity = {{ value = 1, {bytes_}\nbandwidth = {{ value = {value}, {source}\n"
    path.write_text('name = "n"\nvendor = "v"\n[sources]\nA = "x"\n' + memory)
    with pytest.raises(cg.SpecError, match=r"memory: bandwidth: value 1E.*, expected a number .* from 1e-60 to 1e60"):
        cg.load_hardware(path)
