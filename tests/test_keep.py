"""Tensors that program variables keep alive beyond their last reading op."""

import json

import pytest
from each import each

import costgraph as cg
from costgraph.errors import FormatError, GraphError
from costgraph.files.graphs import (
    load,
    save,
)
from costgraph.testing import check_training

B, D, L = cg.dims("B D L")
POINT = {"B": 3, "D": 5}


def chain(hold):
    """Three elementwise ops in a row; a variable holds the first result until the third."""
    with cg.Graph("g", dtype="fp32") as g:
        first = cg.relu(g.input("x", (B, D)))
        y = cg.tanh(cg.tanh(first))
        g.output(cg.ops.keep_alive(y, first) if hold else y)
    return g


def test_kept_tensor_lives_until_the_keep():
    # the input and two results at a time; holding the first result, all three
    assert cg.peak_memory(chain(hold=False), **POINT) == 4 * 3 * 5 * 3
    assert cg.peak_memory(chain(hold=True), **POINT) == 4 * 3 * 5 * 4
    rows = {r.tensor: r for r in cg.lifetimes(chain(hold=True), **POINT)}
    assert rows["relu"].dies == "keep_alive"
    assert rows["tanh"].dies == "tanh_1"


def test_keep_is_free():
    held, plain = chain(hold=True), chain(hold=False)
    assert cg.flops(held) == cg.flops(plain)
    assert cg.bytes_moved(held) == cg.bytes_moved(plain)
    assert held.outputs[0].is_view
    assert held.outputs[0].storage is list(held.ops)[-1].operands[0].storage


def test_keep_preserves_first_operand_layout():
    with cg.Graph("g") as g:
        x = g.input("x", (B, D)).T
        y = cg.ops.keep_alive(x, cg.relu(x))
    assert (y.sizes, y.strides, y.dtype) == (x.sizes, x.strides, x.dtype)


def layered(hold):
    """A stack of layers whose input is held until the layer ends; the last layer's result is held beyond the stack."""

    def layer(x):
        y = cg.tanh(x) * 2.0
        z = cg.relu(cg.linear(y, "b d -> b e", e=D))
        return cg.ops.keep_alive(z, x, y) if hold else z

    with cg.Graph("g", dtype="fp32") as g:
        start = g.input("x", (B, D), grad=True) * 3.0
        y = cg.repeat(L, layer, start, name="layers")
        y = cg.ops.keep_alive(cg.tanh(y), start, y) if hold else cg.tanh(y)
        g.output(cg.reduce(y, "b d -> ", "mean"))
    return g


def test_gradients_pass_to_the_returned_tensor_only():
    check_training(layered(hold=True), **POINT, L=3)


def test_backward_pass_keeps_no_variables():
    # held variables extend no saved tensor's lifetime, and no byte is saved twice
    held, plain = (cg.training_step(layered(hold)) for hold in (True, False))
    sizes = {**POINT, "L": 4}
    assert cg.saved_bytes(held, **sizes) == cg.saved_bytes(plain, **sizes)
    assert cg.flops(held, **sizes) == cg.flops(plain, **sizes)
    assert cg.bytes_moved(held, **sizes) == cg.bytes_moved(plain, **sizes)


def test_held_tensors_get_no_gradient():
    with cg.Graph("g", dtype="fp32") as g:
        x, beside = g.param("x", (B, D)), g.param("beside", (B, D))
        g.output(cg.reduce(cg.ops.keep_alive(x * 2.0, beside * 2.0), "b d -> ", "sum"))
    assert {t.name for t in cg.backward(g).gradients} == {"x"}


def test_keep_survives_a_file(tmp_path):
    save(chain(hold=True), tmp_path / "g.json")
    assert cg.peak_memory(load(tmp_path / "g.json")) == cg.peak_memory(chain(hold=True))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"attrs": {"until": 3}}, "attribute 'until' of 'keep_alive'"),
        ({"operands": []}, "keep_alive without operands, expected at least one"),
    ],
)
def test_damaged_keep_in_file_raises(tmp_path, change, text):
    path = tmp_path / "g.json"
    save(chain(hold=True), path)
    data = json.loads(path.read_text())
    next(n for n in data["nodes"] if n.get("kind") == "keep_alive").update(change)
    path.write_text(json.dumps(data))
    with pytest.raises(FormatError, match=text):
        load(path)


@each("wrong", [None, 3, "x"])
def test_non_tensor_operands_raise(wrong):
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))
        with pytest.raises(GraphError, match="keep_alive"):
            cg.ops.keep_alive(x, wrong)
        with pytest.raises(GraphError, match="keep_alive"):
            cg.ops.keep_alive(wrong)
