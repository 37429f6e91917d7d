"""Real runs as references for traces: peaks from the profiler's allocation events, FLOPs from torch's counter."""

import gc

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import costgraph as cg


def adamw(parameters):
    return torch.optim.AdamW(parameters, foreach=True)


def stepper(module, inputs, optimizer=None):
    """Return the function to measure: a forward pass without gradients, or a whole training step."""

    def forward():
        with torch.no_grad():
            return module(*inputs)

    def step():
        module(*inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    return forward if optimizer is None else step


def real_peak(run, *held):
    """Return the peak bytes of the second run: the baseline plus the allocations above it."""
    gc.collect()
    gc.disable()
    try:
        run()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            run()
    finally:
        gc.enable()
    live = most = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return most + sum(storages.values())


def held_by(module, inputs, optimizer=None):
    state = [] if optimizer is None else [v for s in optimizer.state.values() for v in s.values()]
    return [*module.parameters(), *module.buffers(), *inputs, *(t for t in state if isinstance(t, torch.Tensor))]


def differences(graph, module, inputs, optimizer=None, **sizes):
    """Return the real peak less the predicted one, and the same for FLOPs."""
    run = stepper(module, inputs, optimizer)
    run()  # state exists
    peak = real_peak(run, *held_by(module, inputs, optimizer))
    with FlopCounterMode(display=False) as counter:
        run()
    flops = cg.matmul_flops(graph, count="full", **sizes)
    return peak - cg.peak_memory(graph, **sizes), counter.get_total_flops() - flops
