"""Small programs, and the kernels that torch's inductor makes of them.

    python tests/with_torch/inductor_programs.py

rewrites `inductor_kernels.json`: the loop kernels of each program after fusion, with the bytes of the buffers that each
reads and writes. It uses the GPU scheduler (Triton's) without a GPU: compilation stops before code generation. CPU-only
lowerings are disabled.
"""

import inspect
import json
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

RECORD = Path(__file__).with_name("inductor_kernels.json")


class Residual(nn.Module):
    """Two convolutions and a shortcut convolution, with batch norm, in-place activation and a residual."""

    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(11, 13, 3, padding=1, bias=False)
        self.two = nn.Conv2d(13, 13, 3, padding=1, bias=False)
        self.side = nn.Conv2d(11, 13, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(13) for _ in range(3))

    def forward(self, x):
        h = functional.relu(self.norms[0](self.one(x)), inplace=True)
        y = self.norms[1](self.two(h))
        y += self.norms[2](self.side(x))
        return functional.relu(y, inplace=True)


class Program(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *operands):
        return self.function(*operands)


def rms_norm(x, w):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w


def layer_norms(x, y, w, u):
    total = x + y
    return functional.gelu(functional.layer_norm(total, (61,), w)) @ u, total


def squeeze(x, w):
    return x * torch.sigmoid(functional.silu(x).mean((2, 3)) @ w)[:, :, None, None]


def bias_gradient(g, h):
    gradient = g * torch.cos(h)
    return gradient, gradient.sum(0)


def gradient_of_logits(rows, targets):
    spots = torch.zeros_like(rows).scatter(1, targets[:, None], -1 / 37)
    return torch.ops.aten._log_softmax_backward_data(spots, rows, 1, torch.float32)


def rotary(x, cosine, sine):
    half = x.shape[-1] // 2
    return (x * cosine + torch.cat((-x[..., half:], x[..., :half]), -1) * sine).transpose(0, 1)


def named(x, w):
    wide = x * 2
    variance = wide.pow(2).mean(-1, keepdim=True)
    scaled = wide * torch.rsqrt(variance + 1e-5)
    return w * scaled


def looked_up(x, ids):
    rows = functional.embedding(ids, x)
    return rows / rows.sum(-1, keepdim=True)


def combined(x, scores, residual, ids):
    return residual + (x * scores)[ids].reshape(19, 2, 61).sum(1)


#: Functions, or a module, and the shapes of their operands, or the number of indices: too few rows for a split
#: reduction.
PROGRAMS = {
    "conv, norm, relu, residual": (Residual, [(3, 11, 17, 17)]),
    "softmax": (lambda x: torch.softmax(torch.relu(x), -1) * 2, [(37, 61)]),
    "gelu mlp": (lambda x, w, v: functional.gelu(x @ w) @ v, [(37, 61), (61, 53), (53, 61)]),
    "gated mlp": (lambda x, w, v, u: (functional.silu(x @ w) * (x @ v)) @ u, [(37, 61), (61, 53), (61, 53), (53, 61)]),
    "rms norm": (rms_norm, [(37, 61), (61,)]),
    "residual, layer norm, gelu": (layer_norms, [(37, 61), (37, 61), (61,), (61, 61)]),
    "statistics of columns": (lambda x: torch.tanh(torch.relu(x).sum(0)), [(23, 307)]),
    "rows by columns": (lambda x: x / x.sum(1), [(53, 53)]),
    "broadcast": (lambda x, z: torch.relu(torch.relu(torch.tanh(x)) + z), [(3, 5), (7, 3, 5)]),
    "two of one": (lambda x, w: (torch.relu(x) @ w, torch.tanh(x) @ w), [(53, 61), (61, 53)]),
    "transposed": (lambda x, y: torch.tanh(torch.relu(x).T) + y, [(7, 53), (53, 7)]),
    "pooled": (lambda x: torch.relu(functional.max_pool2d(torch.relu(x), 3, 2, 1)), [(3, 5, 17, 17)]),
    "squeeze and excite": (squeeze, [(3, 7, 17, 17), (7, 7)]),
    "gradient of a bias": (bias_gradient, [(37, 53), (37, 53)]),
    "rotary embedding": (rotary, [(3, 5, 7, 22), (7, 22), (7, 22)]),
    "joined": (lambda x, y: torch.relu(torch.cat((torch.tanh(x), y), 1)), [(37, 53), (37, 61)]),
    "values that variables name longer": (named, [(37, 61), (61,)]),
    "rows of a table": (looked_up, [(37, 61), 37]),
    "rows combined": (combined, [(38, 61), (38, 1), (19, 61), 38]),
    "gradient of a loss": (gradient_of_logits, [(37, 61), 37]),
}


def _operand(shape):
    """Return random numbers, or as many indices."""
    return torch.randn(shape) if isinstance(shape, tuple) else torch.randint(0, shape, (shape,))


def program(name):
    """Return a program as a module, and its operands."""
    function, shapes = PROGRAMS[name]
    module = function() if isinstance(function, type) else Program(function)
    return module.eval(), [_operand(shape) for shape in shapes]


@cache
def _as_for_a_gpu():
    """Disable inductor's CPU-only lowerings."""
    from torch._inductor import config, ir, lowering, scheduler

    config.cpu_backend, config.fx_graph_cache, config.layout_optimization = "triton", False, False
    ir.is_cpu = lambda _: False
    cpu_check = 'inputs[0].get_device().type == "cpu"'
    exec(inspect.getsource(lowering.cat).replace(cpu_check, "False"), vars(lowering))
    # otherwise the registered overloads keep the CPU lowering
    lowering.lowerings[torch.ops.aten.cat.default] = lowering.cat
    for kind in (scheduler.ExternKernelSchedulerNode, scheduler.NopKernelSchedulerNode):
        kind.group = None  # unused by the GPU scheduler


def kernels(name):
    """Return the bytes for each loop kernel that inductor generates for a program."""
    from torch._inductor import scheduler

    class Scheduled(Exception):  # noqa: N818  # no error
        pass

    byte_counts = []

    def codegen(self):
        loops = [n for n in self.nodes if isinstance(n, (scheduler.SchedulerNode, scheduler.FusedSchedulerNode))]
        byte_counts.extend(node.get_read_write_buffers_sizes() for node in loops)
        raise Scheduled

    _as_for_a_gpu()
    scheduler.Scheduler.codegen = codegen
    module, operands = program(name)
    torch._dynamo.reset()
    try:
        with torch.no_grad():
            torch.compile(module)(*operands)
    except Exception as error:
        if "Scheduled" not in repr(error):
            raise
    return byte_counts


if __name__ == "__main__":
    made = {name: kernels(name) for name in PROGRAMS}
    record = {"torch": torch.__version__, "date": "2026-11-23", "bytes of each kernel": made}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
