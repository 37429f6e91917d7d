"""Random torch programs, traced with open sizes and compared with torch at other sizes."""

import gc
import weakref

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import costgraph as cg
from costgraph.torch import trace

from .writes import drawn_writes

#: Statements that preserve the shape (batch, length, width) of `x`; K is the width.
STEPS = (
    # elementwise
    "x = x.sin()",
    "x = x.exp() * 0.1",
    "x = functional.gelu(x)",
    "x = functional.silu(x)",
    "x = x.tanh() * y",
    "x = torch.relu(x)",
    "x = functional.softplus(x)",
    "x = x.sigmoid() + 1",
    "x = x / (1 + y * y)",
    "x = x ** 2",
    "x = torch.where(x > 0, x, y)",
    "x = torch.maximum(x, y)",
    "x = x.clamp(-1, 1)",
    "x = x.masked_fill(x > 1, 0.0)",
    "x = torch.addcmul(x, y, y)",
    "x = torch.addcdiv(x, y, y.abs() + 1)",
    "x = torch.lerp(x, y, 0.3)",
    "x = functional.elu(x)",
    "x = functional.leaky_relu(x, 0.2)",
    "x = functional.hardswish(x)",
    "x = functional.mish(x)",
    "x = x.abs().sqrt()",
    "x = torch.atan2(x, y)",
    "x = (x * x + 1).log()",
    # views and slices
    "x = x.mT.contiguous().mT",
    "x = x.flip(1)",
    "x = x.roll(1, 1)",
    "x = torch.cat([x[:, 1:], x[:, :1]], 1)",
    "x = torch.cat(x.chunk(2, -1)[::-1], -1)",
    "x = x[:, :, : K // 2].repeat(1, 1, 2)",
    "x = x[:, :1] + y",
    "x = x.unflatten(-1, (2, -1)).transpose(1, 2).transpose(1, 2).flatten(-2)",
    "x = x.permute(2, 0, 1).permute(1, 2, 0)",
    "x = torch.stack([x, y]).sum(0)",
    "x = x[..., None].expand(-1, -1, -1, 2).sum(-1)",
    "y = x[:, -1:] * y",
    "x = functional.pad(x[:, 1:], (0, 0, 1, 0))",
    "x = x.tril()",
    "x = x.unbind(1)[0][:, None] * y",
    "x = x + x[:, 0][:, None] * x[:, 0].sin()[:, None]",
    "x = x[:, :8].sum(1, keepdim=True) * x[:, :8].cos().mean(1, keepdim=True) + y",
    # in-place updates
    "x = x * 1; x[:, 0] = 2.0",
    "x = x * 1; x[..., :2].mul_(y[..., :2])",
    "x = (x + 1).mul_(2)",
    "x = (x * 2).relu_()",
    "x = x.clone(); x[:, 1:].add_(y[:, 1:])",
    "x = x + 1; x.masked_fill_(y > 0, 0.0)",
    # gathers and sorts
    "x = x.gather(1, x.argmax(1, keepdim=True).expand_as(x))",
    "x = x[:, torch.tensor([0, 1])].mean(1, keepdim=True) + y",
    "x = x.index_select(-1, torch.arange(K).flip(0))",
    "x = x.sort(-1).values",
    "x = x.topk(2, -1).values.sum(-1, keepdim=True) * y",
    "x = x.cumsum(1)",
    "x = x.index_add(1, torch.tensor([0, 1]), y[:, :2])",
    # reductions and norms
    "x = x - x.mean(-1, keepdim=True)",
    "x = x / (x.std(-1, keepdim=True) + 1)",
    "x = x.softmax(-1)",
    "x = x.log_softmax(1)",
    "x = x - x.amax(-1, keepdim=True)",
    "x = x * x.norm(dim=-1, keepdim=True)",
    "x = functional.layer_norm(x, (K,))",
    "x = functional.rms_norm(x, (K,))",
    "x = x - x.logsumexp(1, keepdim=True)",
    "x = functional.normalize(x, dim=-1)",
    "x = x * x.prod(-1, keepdim=True)",
    "x = x.prod(1)[:, None] + y",
    "x = x.cumprod(1)",
    "x = x.sum(1, keepdim=True) + y",
    "x = self.norm(x)",
    "x = x.amin(1, keepdim=True) + y",
    "x = x.max(1, keepdim=True).values + y",
    # casts and autocast
    "x = x.bfloat16().sin().float()",
    "x = x.double().mean(-1, keepdim=True).float() * y",
    "with torch.autocast('cpu', torch.bfloat16): x = self.a(x).float()",
    # matmuls
    "x = self.a(x)",
    "x = functional.linear(x, self.a.weight.T)",
    "x = (x @ x.mT).softmax(-1) @ x",
    "x = self.b(x.mT).mT",
    "x = torch.einsum('bij,bkj->bik', x, y).softmax(-1) @ y",
    "x = self.mlp(x)",
    "x = self.embed((x[..., 0] > 0).long())",
    (
        "q, k = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (x, y)); "
        "x = functional.scaled_dot_product_attention(q, k, q).transpose(1, 2).flatten(-2)"
    ),
    "x = functional.scaled_dot_product_attention(x[:, None], x[:, None], y[:, None], is_causal=True)[:, 0]",
    "x = functional.glu(self.wide(x))",
    "x = functional.avg_pool1d(x.mT, 3, 1, 1).mT",
    "x = functional.max_pool1d(x.mT, 3, 1, 1).mT",
    # loops, detached tensors and checkpoints
    "for _ in range(3): x = self.a(x).tanh()",
    "x = x + x.detach().cos()",
    "x = checkpoint(self.mlp, x, use_reentrant=False)",
    "y = x.detach() * 2",
    "x = x + y",
    "y = x",
    "x = functional.dropout(x, 0.1)",
    "with torch.no_grad(): y = y.sin()",
)
#: Parts of statements that give exact zeros, for which the gradient of a product takes another, data-dependent path.
ZEROS = ("relu", "hardswish", "dropout", "masked_fill", "tril", "pad(", "torch.where")
LOSSES = (
    "x.mean()",
    "x.sum()",
    "(x * x).mean()",
    "functional.mse_loss(x, y.detach())",
    "x.float().logsumexp((0, 1, 2))",
    "functional.smooth_l1_loss(x, y.detach())",
    "functional.gaussian_nll_loss(x, y.detach(), y.abs() + 1)",
    "functional.cross_entropy(x.flatten(0, 1), torch.zeros(x.shape[0] * x.shape[1], dtype=torch.long))",
)


class Program(nn.Module):
    """A sequence of random statements over a few layers."""

    def __init__(self, width, lines, loss):
        super().__init__()
        self.a, self.b, self.wide = (
            nn.Linear(width, width),
            nn.Conv1d(width, width, 3, padding=1),
            nn.Linear(width, 2 * width),
        )
        self.norm, self.embed = nn.LayerNorm(width), nn.Embedding(5, width)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
        body = [f"K = {width}", "x = self.a(x)", "y = x", *lines, f"return {loss}"]
        self.text = "def forward(self, x):\n" + "".join(f"    {line}\n" for line in body)
        scope = {"torch": torch, "functional": functional, "checkpoint": checkpoint}
        exec(compile(self.text, "<program>", "exec"), scope)
        self.run = scope["forward"]

    def forward(self, x):
        return self.run(self, x)


class Live(TorchDispatchMode):
    """Track the peak bytes in live storages."""

    def __init__(self, *held):
        super().__init__()
        self.found, self.live, self.peak = {}, 0, 0
        self.add(held)

    def add(self, tensors):
        for t in tree_leaves(tensors):
            storage = t.untyped_storage() if isinstance(t, torch.Tensor) else None
            if storage is None or storage._cdata in self.found:
                continue
            key, amount = storage._cdata, storage.nbytes()
            self.found[key] = weakref.ref(storage, lambda _, key=key, amount=amount: self.gone(key, amount))
            self.live += amount
            self.peak = max(self.peak, self.live)

    def gone(self, key, amount):
        self.found.pop(key, None)
        self.live -= amount

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        self.add(outputs)
        return outputs


def tracked(run, held):
    """Return the peak bytes of live storages in a run, without kernel workspaces."""
    gc.collect()
    with Live(*held) as live:
        run()
    return live.peak


aten = torch.ops.aten


def formula(op):
    """Return torch's FLOP formula of another op, unchanged."""

    def counted(*args, **kwargs):
        return flop_registry[op](*args, **kwargs)

    counted._get_raw = True
    return counted


#: torch's counter has no formula for the CPU attention kernel.
COUNTED = {
    aten._scaled_dot_product_flash_attention_for_cpu: formula(aten._scaled_dot_product_flash_attention),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: formula(
        aten._scaled_dot_product_flash_attention_backward
    ),
}


def profiled(run, held):
    """Return the peak bytes of a second run: live bytes, plus the allocations above them."""
    from torch.profiler import ProfilerActivity, profile

    gc.collect()
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    live = most = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most + sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())


def drawn(rng):
    """Return a module and the source of its forward pass."""
    width = rng.choice((8, 16, 24))
    lines = rng.sample(STEPS, rng.randint(2, 7))
    if any("prod(" in line for line in lines):
        lines = [line for line in lines if not any(text in line for text in ZEROS)]
    if rng.random() < 0.25 and not any("prod(" in line for line in lines):
        writes, views = drawn_writes(rng)
        read = rng.choice(("", *(f"; x = x + {view}.sum()" for view in views), f"; x = {views[0]}.sin().sum() + y"))
        start = rng.choice(("x = x * 1", "x = self.a(x)", "x = x.sin()"))
        lines.insert(rng.randint(0, len(lines)), [f"w = x * 1; {start}", *writes, f"y = y{read}"])
        lines = [part for line in lines for part in (line if isinstance(line, list) else [line])]
    torch.manual_seed(0)
    return Program(width, lines, rng.choice(LOSSES)), width


def check(rng):
    """Draw a program and compare it with torch.

    Returns
    -------
    tried : int
        Number of queries.
    refused : list of str
        Errors of the refused queries.
    wrong : list of str
        Differing numbers, with the program source.
    """
    net, width = drawn(rng)
    batch, length = rng.choice((2, 3, 5)), rng.choice((16, 29, 64))
    other = torch.zeros(7, 11, width)
    x = torch.randn(batch, length, width)
    dims = [("B", "S", None)]
    sizes = {"B": batch, "S": length}

    def forward():
        with torch.no_grad():
            net(x)

    def step():
        net(x).backward()
        net.zero_grad()

    try:
        forward()
    except Exception:  # incompatible statements: skip the program
        return 0, [], []
    try:
        step()
        trains = True
    except RuntimeError:  # an in-place write to a saved tensor, or no gradient
        net.zero_grad()
        trains = False
    held = [*net.parameters(), x]
    wrong, refused, tried = [], [], 0
    # the forward graph does not recompute; `backward(..., recompute=)` models its checkpoints
    derived = trains and "checkpoint" not in net.text
    # kernels whose workspace oneDNN chooses or allocates per thread
    library = any(part in net.text for part in ("self.b(", "autocast", "scaled_dot_product"))
    queries = []
    if "max_pool1d" not in net.text:  # uses another kernel where no gradient is needed
        queries.append(("forward", lambda: trace(net, other, dims=dims), forward))
    # autograd replays the views of fake tensors, where it takes those of real ones with `as_strided`
    if trains and "z0 = " not in net.text:
        queries.append(("traced step", lambda: trace(net, other, dims=dims, train=True), step))
    if derived:
        queries.append(("derived step", lambda: cg.backward(trace(net, other, dims=dims)), step))
    seen = {}
    for what, build, run in queries:
        tried += 1
        try:
            graph = build()
            flops, peak = int(cg.matmul_flops(graph, count="full", **sizes)), int(cg.peak_memory(graph, **sizes))
        except cg.CostGraphError as error:
            refused.append(f"{what}: {error}")
            continue
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {str(error)[:200]}\n{net.text}")
            continue
        if run not in seen:
            with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
                run()
            most = profiled(run, held)
            seen[run] = counter.get_total_flops(), tracked(run, held) if library else most, most
        expected, least, most = seen[run]
        if flops != expected:
            wrong.append(f"{what}: {flops} FLOPs, torch counts {expected} at {sizes}\n{net.text}")
        real = min(max(peak, least), most)
        if abs(peak - real) > max(4096, 0.01 * real):
            wrong.append(f"{what}: peak {peak}, the allocator {real} ({peak / real - 1:+.1%}) at {sizes}\n{net.text}")
    return tried, refused, wrong
