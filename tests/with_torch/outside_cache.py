"""Single-op graphs with the equivalent torch calls, and their comparison."""

import torch
from torch.nn import functional

import costgraph as cg
from costgraph.torch import calibration
from costgraph.torch.measurement import timed

CPU = torch.device("cpu")


def shortly(patch):
    """Run each calibration probe once, with small matmuls and working sets for a small cache.

    The rates are meaningless; such a calibration only tests the output's structure.
    """
    run, products_of = calibration.timed, calibration.products

    def convolution(device, name, dtype):
        image, window = torch.rand(1, 8, 9, 9).to(dtype), torch.rand(8, 8, 3, 3).to(dtype)
        call = lambda: functional.conv2d(image, window)  # noqa: E731
        key = ("matmul", name, "convolution")
        return calibration.Probe(key, "a small convolution", 2 * 8 * 8 * 9 * 49, call, f"{name} convolution")

    once = {"least": 1, "most": 100, "budget": 0.001}
    patch.setattr(calibration, "last_level_cache", lambda where: 2**22)
    patch.setattr(calibration, "timed", lambda call, where, **_: run(call, where, **once))
    patch.setattr(calibration, "products", lambda where, sizes: products_of(where, [64, 256]))
    patch.setattr(calibration, "_convolution", convolution)
    patch.setattr(calibration, "_LONGEST", 0.05)


def declared(build, *shapes, dtype="fp32"):
    """Return a graph of `build` on inputs with these shapes."""
    with cg.Graph("case", dtype=dtype) as graph:
        graph.output(build(*(graph.input(f"x{i}", shape) for i, shape in enumerate(shapes))))
    return graph


def elementwise(n):
    """Yield sums, functions and reductions over n rows of 1024."""
    shape = (n, 1024)
    x, y, out = torch.rand(shape), torch.rand(shape), torch.rand(shape)
    column = torch.rand(n)
    yield "add", declared(lambda a, b: a + b, shape, shape), lambda: torch.add(x, y, out=out)
    yield "relu", declared(cg.relu, shape), lambda: torch.clamp_min(x, 0, out=out)
    yield "gelu", declared(cg.gelu, shape), lambda: functional.gelu(x)
    yield "silu", declared(cg.silu, shape), lambda: functional.silu(x)
    yield "sum of rows", declared(lambda a: cg.reduce(a, "n d -> n", "sum"), shape), lambda: torch.sum(x, 1, out=column)
    yield "sum of columns", declared(lambda a: cg.reduce(a, "n d -> d", "sum"), shape), lambda: torch.sum(x, 0)
    yield "sum", declared(lambda a: cg.reduce(a, "n d -> ", "sum"), shape), lambda: torch.sum(x)
    yield "max of rows", declared(lambda a: cg.reduce(a, "n d -> n", "max"), shape), lambda: torch.amax(x, 1)
    yield "softmax", declared(lambda a: cg.softmax(a, -1), shape), lambda: torch.softmax(x, -1)
    yield "transpose", declared(lambda a: cg.rearrange(a, "n d -> d n") + 0, shape), lambda: x.T.contiguous()
    yield "layer_norm", declared(cg.layer_norm, shape), lambda: functional.layer_norm(x, (1024,))
    yield "rms_norm", declared(cg.rms_norm, shape), lambda: functional.rms_norm(x, (1024,))


def products(m, k, n, dtype="fp32"):
    """Yield a matmul of (m, k) and (k, n)."""
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[dtype]
    a, b = torch.rand(m, k).to(kind), torch.rand(k, n).to(kind)
    graph = declared(lambda x, y: cg.einsum(x, y, "m k, k n -> m n"), (m, k), (k, n), dtype=dtype)
    yield f"{dtype} product of {m} x {k} x {n}", graph, lambda: a @ b


def fastest(call, least=7, budget=0.4):
    """Return the fastest run's seconds."""
    with torch.no_grad():
        return timed(call, CPU, least=least, most=10**5, budget=budget).min
