"""Refusals of optimizers, and their messages."""

import re

import pytest
from each import each

import costgraph as cg
from costgraph.files.graphs import typed
from costgraph.optimizers import (
    SGD,
    Adafactor,
    AdaGrad,
    Adam,
    AdamW,
    Lion,
    Muon,
    RMSProp,
    Slot,
    clip_grad_norm,
    over,
    unscale,
    zero_grad,
)
from costgraph.optimizers.optimizer import fused_update


@each(
    ("make", "text"),
    [
        (
            lambda: Adam(implementation="eager"),
            "Adam: implementation 'eager', expected one of foreach, for-loop, fused",
        ),
        (lambda: Lion(implementation="fused"), "Lion: implementation 'fused', expected one of for-loop"),
        (lambda: Lion(implementation="foreach"), "Lion: implementation 'foreach', expected one of for-loop"),
        (lambda: RMSProp(implementation="fused"), "'fused', expected one of foreach, for-loop"),
        (lambda: Adafactor(implementation="fused"), "'fused', expected one of foreach, for-loop"),
        (lambda: Muon(implementation="foreach"), "Muon: implementation 'foreach', expected one of for-loop"),
        (lambda: Adam(lr=-1), "Adam: lr is -1, expected a number from 0 to inf"),
        (lambda: Adam(lr="big"), "Adam: lr is 'big', expected a number"),
        (lambda: Adam(lr=True), "Adam: lr is True, expected a number"),
        (lambda: Adam(lr=float("nan")), "Adam: lr is nan, expected a number"),
        (lambda: Adam(step=0), "Adam: step is 0, expected a number from 1"),
        (lambda: Adam(betas=(0.9, 1)), "Adam: beta2 is 1, expected a number below 1"),
        (lambda: Adam(betas=(-0.1, 0.9)), "Adam: beta1 is -0.1, expected a number from 0 to 1"),
        (lambda: Adam(eps=-1), "Adam: eps is -1"),
        (lambda: Adam(weight_decay=-1), "Adam: weight_decay is -1"),
        (lambda: Adam(amsgrad=1), "Adam: amsgrad is 1, expected True or False"),
        (lambda: Adam(counters="disk"), "Adam: counters 'disk', expected one of host, device"),
        (lambda: Adam(counters="device"), "Adam: counters 'device' with implementation 'foreach', expected 'host'"),
        (lambda: AdamW(decoupled_weight_decay=False), "AdamW: decoupled_weight_decay is False, expected True"),
        (lambda: SGD(momentum=-1), "SGD: momentum is -1"),
        (lambda: SGD(weight_decay=-1), "SGD: weight_decay is -1"),
        (lambda: SGD(dampening=None), "SGD: dampening is None"),
        (lambda: SGD(nesterov=True), "SGD: nesterov with momentum 0 and dampening 0, expected a nonzero momentum"),
        (lambda: SGD(nesterov=True, momentum=0.9, dampening=0.1), "nesterov with momentum 0.9 and dampening 0.1"),
        (lambda: AdaGrad(lr_decay=-1), "AdaGrad: lr_decay is -1"),
        (lambda: AdaGrad(eps=-1), "AdaGrad: eps is -1"),
        (lambda: RMSProp(alpha=-1), "RMSProp: alpha is -1"),
        (lambda: RMSProp(weight_decay=-1), "RMSProp: weight_decay is -1"),
        (lambda: Lion(betas=(2, 0.9)), "Lion: beta1 is 2"),
        (lambda: Lion(weight_decay=-1), "Lion: weight_decay is -1"),
        (lambda: Adafactor(d=0.5), "Adafactor: d is 0.5, expected a number from 1"),
        (lambda: Adafactor(beta2_decay=0.5), "Adafactor: beta2_decay is 0.5"),
        (lambda: Adafactor(eps=(-1, 0)), "Adafactor: eps1 is -1"),
        (lambda: Muon(ns_steps=100), "Muon: ns_steps is 100, expected a number from 0 to 99"),
        (lambda: Muon(ns_steps=1.5), "Muon: ns_steps is 1.5, expected a whole number"),
        (lambda: Muon(momentum=-1), "Muon: momentum is -1"),
        (lambda: Muon(eps=-1), "Muon: eps is -1"),
        (lambda: Muon(adjust_lr_fn="x"), "Muon: adjust_lr_fn 'x', expected one of original, match_rms_adamw"),
        (lambda: Muon(takes=3), "Muon: takes is 3, expected a function"),
        (lambda: Muon(others=3), "Muon: others is 3, expected an optimizer"),
    ],
)
def test_invalid_values_are_refused(make, text):
    with pytest.raises(cg.GraphError, match=re.escape(text)):
        make()


def pair(graph, *sizes, name="w"):
    return Slot(graph.param(name, sizes), graph.input(f"{name}.grad", sizes))


@each("step", [Adam().update, Muon().update, zero_grad, unscale, lambda s: clip_grad_norm(s, 1.0)])
@each("slots", [[], None, [3]])
def test_missing_slots_are_refused(step, slots):
    with cg.Graph("g"), pytest.raises(cg.GraphError, match="expected a nonempty list of Slot"):
        step(slots)


def test_invalid_slots_are_refused():
    with cg.Graph("g") as g:
        w = g.param("w", (3, 5))
        with pytest.raises(cg.GraphError, match="grad 3, expected a parameter and its tensors"):
            Slot(w, 3)
        with pytest.raises(cg.ShapeError, match=r"grad g.*, expected the parameter's shape"):
            Slot(w, g.input("g", (5, 3)))
        with pytest.raises(cg.ShapeError, match=r"master m.*, expected the parameter's shape"):
            Slot(w, w, g.input("m", (3, 5, 1)))
        with pytest.raises(cg.ShapeError, match=r"state 'w.sum': axis 0: 0, expected a positive integer"):
            Slot(w, w).state("sum", (0,))


def test_updating_twice_is_refused():
    with cg.Graph("g") as g:
        slots = Adam().update([pair(g, 7)])
        with pytest.raises(cg.GraphError, match=r"'w.exp_avg': the name is taken"):
            Adam().update(slots)


def test_muon_requires_known_shorter_side():
    d, f = cg.dims("D F")
    with cg.Graph("g") as g:
        with pytest.raises(cg.ShapeError, match=r"parameter of D by F, expected .* graph.assume\('D >= F'\)"):
            Muon().update([pair(g, d, f)])
        with pytest.raises(cg.ShapeError, match=r"parameter v.*, expected at least two axes"):
            Muon(takes=lambda s: True).update([pair(g, 7, name="v")])


def test_invalid_step_arguments_are_refused():
    with cg.Graph("g") as g:
        slots = [pair(g, 7)]
        with pytest.raises(cg.GraphError, match="clip_grad_norm: max_norm is -1, expected a number from 0"):
            clip_grad_norm(slots, -1)
        with pytest.raises(cg.GraphError, match="clip_grad_norm: foreach is int"):
            clip_grad_norm(slots, 1, foreach=1)
        with pytest.raises(cg.GraphError, match="zero_grad: set_to_none is None"):
            zero_grad(slots, set_to_none=None)
        with pytest.raises(cg.GraphError, match=r"unscale: scale x.*, expected a scalar"):
            unscale(slots, g.input("x", (3,)))


def test_invalid_parameter_groups_are_refused():
    with cg.Graph("g") as g:
        slot = pair(g, 3, 5)
        slot.param.storage.pieces = 1
        with pytest.raises(
            cg.GraphError, match=r"mixed: .*, expected all tensors in the same layer stack, or none in a stack"
        ):
            over([(slot.param, slot.grad)], lambda p, g: None, "mixed")


def test_fused_update_must_be_elementwise():
    with cg.Graph("g") as g:
        slot = pair(g, 3, 5)
        with pytest.raises(cg.GraphError, match="op 'einsum' of kind 'einsum', expected elementwise ops only"):
            fused_update(
                lambda calls, p, g: (calls.each("x", lambda p, g: cg.einsum(p, g, "a b, a b -> a b"), p, g)[0], g),
                (slot.param, slot.grad),
                name="update",
            )
        with pytest.raises(cg.ShapeError, match="expected equal shapes"):
            fused_update(SGD()._update, (slot.param, g.input("x", (1, 5))), name="update")


@each(
    ("attribute", "value"),
    [
        ("updated", 0), ("updated", 9), ("updated", True), ("changed", ()), ("changed", (0, 0)),
        ("changed", (1,)), ("changed", "0"), ("steps", 3), ("steps", (3,)), ("steps", ((1, 2, 3, 4),)),
    ],
)  # fmt: skip
def test_damaged_record_is_refused(attribute, value):
    with cg.Graph("g") as g:
        SGD(implementation="fused").update([pair(g, 7)])
        (op,) = g.ops
        operands = [g.param("v", (7,)), g.input("h", (7,))]
        with pytest.raises(cg.GraphError, match=r"fused update: .*, expected|attribute '\w+' of .*, expected"):
            g.add_op(typed(type(op.kind), {**op.kind.stated(), attribute: value}), operands, "again")
