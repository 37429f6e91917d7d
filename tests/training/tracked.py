"""Peak of one AdamW step of a plain torch module in steady state: the second step, with gradients freed before it."""

from contextlib import nullcontext

import plain_models
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile

PLAIN = {"gpt2": plain_models.GPT2, "llama-2-7b": plain_models.Llama, "mlp": plain_models.Perceptron}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def setting(name, sizes, B, S, dtype, implementation, **more):
    """Return a module, its optimizer, and a batch."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[dtype])  # converting later needs references that fake tensors lack
    try:
        module = PLAIN[name](**sizes, **more)
        features = None if name != "mlp" else torch.randn(B, sizes["D"])
    finally:
        torch.set_default_dtype(before)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=implementation == "foreach")
    classes, shape = sizes.get("V", sizes.get("C")), (B,) if name == "mlp" else (B, S)
    ids = torch.randint(0, classes, shape) if features is None else features
    return module, optimizer, ids, torch.randint(0, classes, shape)


def step(module, optimizer, ids, targets):
    plain_models.loss_of(module, ids, targets).backward()
    optimizer.step()
    optimizer.zero_grad()


def tracked_peak(name, sizes, B, S, dtype="fp32", implementation="foreach", again=None, kernel="eager", **more):
    """Return the peak bytes from MemTracker on fake tensors."""
    attention = plain_models.flash() if kernel == "flash" else nullcontext()
    with FakeTensorMode(), attention, plain_models.checkpointed(again):
        parts = setting(name, sizes, B, S, dtype, implementation, **more)
        tracker = MemTracker()
        tracker.track_external(*parts)
        with tracker:
            step(*parts)  # without optimizer state until its end, so never above the second step
            tracker.reset_mod_stats()
            step(*parts)
        (found,) = tracker.get_tracker_snapshot("peak").values()
    return found["Total"]


def measured_peak(name, sizes, B, S, implementation="foreach"):
    """Return the peak bytes of a real step from the CPU profiler, relative to its start."""
    parts = setting(name, sizes, B, S, "fp32", implementation)
    step(*parts)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(*parts)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most
