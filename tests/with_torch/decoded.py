"""Stepwise generation against a single pass: lowered graphs that share parameters and pass caches on."""

from keyword import iskeyword

import torch
from lowered import exact

import costgraph as cg
from costgraph.ir.graph import known_names
from costgraph.torch.lowering import lower, random_inputs


def _module(graph, parameters=None, **sizes):
    with exact():
        module = lower(graph, **{k: v for k, v in sizes.items() if k in known_names(graph)})
    if parameters is not None:
        state = module.state_dict()
        for name, t in parameters.items():
            if name in state and ".kept" not in name and "_kept" not in name:
                state[name].copy_(t)
    return module


def _appended(graph):
    """Return each growing cache's axis, keyed by its name prefix in the module."""
    axes = {}
    for op in graph.walk():
        if op.kind.name == "append":
            levels = op.operands[0].name.replace(".", "_").split("/")
            axes[".".join(f"{n}_" if iskeyword(n) else n for n in levels)] = op.kind.axis
    return axes


def _hand_on(before, after, growing, new):
    """Copy the caches of a step to the next step's inputs, before the new positions."""
    buffers = dict(before.named_buffers())
    for name, target in after.named_buffers():
        if "_kept" not in name:
            continue
        source = buffers[name]
        axis = next((a for start, a in growing.items() if name == start or name.startswith(f"{start}.")), None)
        if axis is None:
            target.copy_(source)
        else:
            old = target.shape[axis] - new
            target.narrow(axis, 0, old).copy_(source.narrow(axis, source.shape[axis] - old, old))


def _inputs(graph, values, start, count):
    """Return the inputs of a graph, sliced to the new positions."""
    taken = []
    for t in graph.tensors:
        if t.role == "input" and t.producer is None:
            x, axis = values[t.name]
            taken.append(x if axis is None else x.narrow(axis, start, count).contiguous())
    return taken


def difference(graph, positions, steps, **sizes):
    """Return the largest difference between the logits of steps and of a single pass, relative to the largest logit.

    Parameters
    ----------
    graph : Graph
        A forward pass over S positions.
    positions : int
        Length of the prompt.
    steps : list of int
        Number of new positions in each step after it.
    """
    whole = positions + sum(steps)
    full = _module(graph, S=whole, **sizes)
    parameters = full.state_dict()
    with exact():
        names = {k: v for k, v in {"S": whole, **sizes}.items() if k in known_names(graph)}
        drawn = random_inputs(graph, **names)
    inputs = [t for t in graph.tensors if t.role == "input" and t.producer is None]
    along = [next((i for i, n in enumerate(t.shape) if str(n) == "S"), None) for t in inputs]
    values = {t.name: pair for t, *pair in zip(inputs, drawn, along, strict=True)}
    expected = full(*drawn)
    decoding = {new: cg.decode(graph, new) for new in sorted(set(steps))}
    growing = _appended(next(iter(decoding.values())))
    prompt = cg.prefill(graph)
    module = _module(prompt, parameters, S=positions, **sizes)
    logits = [module(*_inputs(prompt, values, 0, positions))]
    at = positions
    for new in steps:
        step = decoding[new]
        following = _module(step, parameters, S=at + new, **sizes)
        _hand_on(module, following, growing, new)
        logits.append(following(*_inputs(step, values, at, new)))
        module, at = following, at + new
    got = torch.cat(logits, 1)
    return float((got - expected).abs().max() / expected.abs().max())
