"""A raw record's model as a plain torch module, and its live bytes during a step or a forward pass.

Facts are a row's fields: sizes, optimizer, precision, dropout, attention and checkpoint.
"""

import weakref
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 1e-4}),
    "adamw-for-loop": (torch.optim.AdamW, {"foreach": False}),
    "adamw-foreach": (torch.optim.AdamW, {"foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"fused": True}),
}


class Block(nn.Module):
    def __init__(self, facts):
        super().__init__()
        d, f = facts["d"], facts["f"]
        self.h, self.p, self.fused = facts["h"], facts["dropout"], facts["fused_attention"]
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(d, f, bias=False), nn.Linear(f, d, bias=False)

    def forward(self, x):
        b, s, d = x.shape
        y = self.n1(x)
        q, k, v = (w(y).view(b, s, self.h, d // self.h).transpose(1, 2) for w in (self.q, self.k, self.v))
        if self.fused:
            a = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.p)
        else:
            a = functional.dropout(((q @ k.mT) * (d // self.h) ** -0.5).softmax(-1), self.p) @ v
        x = x + functional.dropout(self.o(a.transpose(1, 2).reshape(b, s, d)), self.p)
        return x + functional.dropout(self.down(functional.gelu(self.up(self.n2(x)))), self.p)


class Model(nn.Module):
    def __init__(self, facts):
        super().__init__()
        v, d = facts["v"], facts["d"]
        self.embed, self.head, self.norm = nn.Embedding(v, d), nn.Linear(d, v, bias=False), nn.LayerNorm(d)
        self.blocks, self.again = nn.ModuleList(Block(facts) for _ in range(facts["layers"])), facts["checkpoint"]

    def forward(self, t):
        x = self.embed(t)
        for b in self.blocks:
            x = checkpoint(b, x, use_reentrant=False) if self.again else b(x)
        return functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), t.flatten())


class Live(TorchDispatchMode):
    """Count the live storage bytes of ops in whole allocator blocks."""

    def __init__(self, block, *there):
        super().__init__()
        self.block, self.found, self.live, self.peak = block, {}, 0, 0
        self.add(there)
        self.start()

    def start(self):
        self.before = self.peak = self.live

    def add(self, tensors):
        for t in tree_leaves(tensors):
            storage = t.untyped_storage() if isinstance(t, torch.Tensor) else None
            if storage is None or storage._cdata in self.found:
                continue
            key, amount = storage._cdata, -(-storage.nbytes() // self.block) * self.block
            self.found[key] = weakref.ref(storage, lambda _, key=key, amount=amount: self.gone(key, amount))
            self.live += amount
            self.peak = max(self.peak, self.live)

    def gone(self, key, amount):
        del self.found[key]
        self.live -= amount

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        self.add(outputs)
        return outputs

    @property
    def above(self):
        """Peak bytes since the start, above the baseline."""
        return self.peak - self.before


class Setting:
    """A module, its optimizer and a batch."""

    def __init__(self, facts):
        self.mixed = facts["precision"] == "bf16-mixed"
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if facts["precision"] == "bf16" else torch.float32)
        try:
            self.model = Model(facts)
        finally:
            torch.set_default_dtype(before)
        kind, options = OPTIMIZERS[facts["optimizer"]]
        self.optimizer = kind(self.model.parameters(), **options)
        self.ids = torch.randint(0, facts["v"], (facts["b"], facts["s"]))

    def autocast(self):
        return torch.autocast("cpu", torch.bfloat16, enabled=self.mixed)

    def step(self):
        with self.autocast():
            loss = self.model(self.ids)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def there(self):
        states = [list(s.values()) for s in self.optimizer.state.values()]
        return [self.ids, list(self.model.parameters()), states]


def tracked_step(facts, block=1):
    """Return the peak bytes of the second step above the baseline, on fake tensors."""
    with FakeTensorMode():
        setting = Setting(facts)
        setting.step()
        with Live(block, setting.there()) as live:
            setting.step()
    return live.above


def tracked_forward(facts, block=1):
    """Return the peak bytes of a second forward pass in one autocast region, on fake tensors."""
    with FakeTensorMode():
        setting = Setting(facts)
        with torch.no_grad(), setting.autocast(), Live(block, setting.there()) as live:
            setting.model(setting.ids)
            live.start()
            setting.model(setting.ids)
            return live.above


def counted_step(facts):
    """Return torch's FLOP count of a step, on fake tensors."""
    with FakeTensorMode():
        setting = Setting(facts)
        with FlopCounterMode(display=False) as counter:
            setting.step()
    return counter.get_total_flops()


@contextmanager
def _profiled():
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield profiler


def measured_step(facts):
    """Return the peak bytes of a real step above the baseline, from the CPU profiler."""
    setting = Setting(facts)
    setting.step()
    with _profiled() as profiler:
        setting.step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most
