"""Lowered graphs against the NumPy interpreter on the same source values, and against the profiler."""

import re
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from costgraph import testing
from costgraph.torch.lowering import (
    context,
    lower,
    random_inputs,
)


@contextmanager
def exact():
    """Run every floating dtype as fp64, like the interpreter, so that rounding does not affect comparisons."""
    floats = {name: torch.float64 for name, d in context.FORMATS.items() if d.is_floating_point}
    blocks = dict.fromkeys(("fp6_e2m3", "fp6_e3m2", "fp4_e2m1", "mxfp8", "mxfp8_e5m2", "mxfp6", "mxfp6_e3m2", "mxfp4",
                            "nvfp4"), torch.float64)  # fmt: skip
    with mock.patch.dict(context.FORMATS, {**floats, **blocks, "int4": torch.int64}):
        yield


def sources(graph, module):
    """Give the layers of a stack the same values, from 0.5 to 1.5, and return the value of each source by name.

    Indices keep their values; the interpreter has one array for all iterations of a loop's parameter.
    """
    generator, found = torch.Generator().manual_seed(5), {}
    for name, t in module.state_dict().items():
        base = re.sub(r"(\.\d+)+\Z", "", name)  # without iteration numbers
        if t.is_floating_point():
            found.setdefault(base, torch.rand(t.shape, generator=generator, dtype=t.dtype) + 0.5)
        t.copy_(found.setdefault(base, t.clone()))
    every = [t for g in graph.bodies() for t in g.tensors if t.producer is None and t.role not in ("formal", "input")]
    out = {}
    for t in every:
        dotted = t.name.replace(".", "_").replace("/", ".")
        if dotted in found:
            out[t.name] = found[dotted].numpy().astype(float)
    return out


def both(graph, point, functions=None):
    """Return the outputs from the lowered graph and the interpreter for the same values."""
    with exact():
        module = lower(graph, functions=functions, **point)
        inputs = [x.abs().clamp(0.5, 2) if x.is_floating_point() else x for x in random_inputs(graph, **point)]
    values = sources(graph, module)
    names = [t.name for t in graph.tensors if t.producer is None and t.role == "input"]
    values |= {n: x.numpy().astype(float) for n, x in zip(names, inputs, strict=True)}
    outputs = module(*(x.clone() for x in inputs))
    return outputs if isinstance(outputs, tuple) else (outputs,), testing.run(graph, values, **point)


def held(graph, run):
    """Return masks with each output's defined elements."""
    out = []
    for t, b in zip(graph.outputs, run.outputs, strict=True):
        mask = np.ones(b.shape, dtype=bool)
        if t.domain is not None:
            v = [v for made, v in run.values if made is t][-1]
            mask = np.array([v.holds(i) for i in np.ndindex(b.shape)]).reshape(b.shape)
        out.append(mask)
    return out


def defined(run):
    """Whether every value of a run is finite: a maximum may hide NaNs."""

    def finite(v):
        points = list(v.points())
        return not points or np.isfinite([v.array[i] for i in points]).all()

    return all(finite(v) for _, v in run.values)


def measured_peak(module, inputs):
    """Return the peak bytes above the baseline, from the CPU profiler."""
    module(*inputs)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        outputs = module(*inputs)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    del outputs
    return most


def throughout(module, inputs):
    """Return the bytes of parameters, buffers and inputs."""
    return sum(t.numel() * t.element_size() for t in (*module.state_dict().values(), *inputs))
