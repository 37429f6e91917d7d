"""costgraph's predictions for a row of a raw record: FLOPs, peak bytes and a lower bound on the time."""

from dataclasses import dataclass, replace
from functools import cache

import record_kernels
import record_model

import costgraph as cg

#: Block size of torch's CUDA allocator, in bytes.
BLOCK = 512
#: From 10 MiB on, torch's allocator requests multiples of 2 MiB and splits a block only if the remainder exceeds this
#: size (`CUDACachingAllocator`: kMinLargeAlloc, kRoundLarge and kSmallSize).
UNSPLIT, LARGE = 2**20, 10 * 2**20
#: The specification of each device name that torch reports; other devices need a file next to the record.
SPECIFICATIONS = {"NVIDIA H200": "h200-sxm", "NVIDIA H100 80GB HBM3": "h100-sxm"}
#: Model sizes by the field names of a row.
SIZES = {"b": "B", "s": "S", "v": "V", "d": "D", "h": "H", "f": "F", "layers": "L"}


def is_model(row):
    return row.name in ("train_step", "forward")


def graph_of(row, device, held=True):
    """Return the declared graph of a row, and its sizes.

    `held` also keeps the tensors that Python variables reference in a forward pass, and the weights that autocast
    converted before. Both affect memory only.
    """
    if not is_model(row):
        return record_kernels.kernel(row.name, row.facts)
    facts, sizes = row.facts, {SIZES[k]: v for k, v in row.facts.items() if k in SIZES}
    common = facts["precision"], facts["dropout"], facts["fused_attention"]
    if row.name == "forward":
        return record_model.forward(*common, device, held), sizes
    return record_model.step(facts["optimizer"], *common, facts["checkpoint"], device), sizes


# -- FLOPs ---------------------------------------------------------------------------------------------------------


@cache
def uncounted(row, device):
    """Return the matmul FLOPs that torch's counter misses: on a CPU, those in scaled_dot_product_attention.

    They are the FLOPs in the attention kernel's scope.
    """
    fused = row.facts["fused_attention"] if is_model(row) else row.name in ("sdpa", "sdpa_decode")
    if device == "cuda" or not fused:
        return 0
    graph, sizes = graph_of(row, device, held=False)
    scope = "blocks/attention" if is_model(row) else "attention"
    return cg.costs(graph, count="full", **sizes).filter(kind="matmul", scope=scope).total().matmul


@cache
def counted(row, device):
    """Return the FLOPs that FlopCounterMode counts."""
    graph, sizes = graph_of(row, device, held=False)
    return cg.matmul_flops(graph, count="full", **sizes) - uncounted(row, device)


def parameters(row, device):
    """Return the parameter count of a step's model."""
    graph, sizes = graph_of(row, device)
    return cg.param_count(graph, **sizes)


# -- memory --------------------------------------------------------------------------------------------------------


def baseline(row, device, block=BLOCK):
    """Return the baseline bytes: persistent tensors, each storage in whole blocks.

    A tensor declared in a block has a storage per layer.
    """
    graph, sizes = graph_of(row, device)
    persistent = [life for life in cg.lifetimes(graph, device=_on(device), **sizes) if life.born is None]
    pieces = [sizes.get("L", 1) if life.tensor.startswith("blocks/") else 1 for life in persistent]
    return sum(-(-life.bytes // (n * block)) * n * block for life, n in zip(persistent, pieces, strict=True))


def _on(device):
    """Return the `device` whose kernels have workspaces, None for a CPU."""
    return "cuda" if device == "cuda" else None


@cache
def peak_above(row, device, allocator="cuda"):
    """Return the peak bytes above the baseline, including `more_bytes`."""
    graph, sizes = graph_of(row, device)
    if row.name == "copy":  # the destination exists before
        return 0
    block = BLOCK if allocator == "cuda" else 1
    peak = cg.peak_memory(graph, allocator=allocator, device=_on(device), **sizes) - baseline(row, device, block)
    return peak + more_bytes(row)


def more_bytes(row):
    """Return the bytes that a norm's forward kernel saves for backward without a backward pass.

    They are the mean and reciprocal standard deviation per row for layer norm, only the latter for RMS norm, in fp32.
    Fused attention writes no log-sum-exp without gradients: an H100 allocates the result alone (torch 2.11).
    """
    if row.name not in ("layer_norm", "rms_norm"):
        return 0
    return (2 if row.name == "layer_norm" else 1) * _in_blocks(4 * row.facts["rows"])


def _in_blocks(amount):
    return -(-amount // BLOCK) * BLOCK


def left(row, device):
    """Return the bytes left afterwards, the result: none for a step, and a copy has its destination before."""
    if row.name in ("train_step", "copy"):
        return 0
    graph, sizes = graph_of(row, device)
    return sum(_in_blocks(life.bytes) for life in cg.lifetimes(graph, **sizes) if life.role == "output")


#: Kernels whose peak may exceed that of their tensors, and the reason.
WORKSPACES = {
    "sum": "partial sums and counters per thread block",
    "conv2d": "cuDNN's workspace, and copies in its layout",
    "sdpa": "two numbers for dropout's generator",
    "sdpa_decode": "partial results over keys, which a second kernel adds",
    "cross_entropy": "a scalar, the sum over weights",
}
#: Why any kernel's result may take more than its bytes.
WHOLE = "up to 1 MiB, because the allocator does not split a large block for less"


def off(row, device):
    """Return the relative error of the predicted peak, and its cause if known, else None."""
    found, wanted = peak_above(row, device), row.memory["peak_above_baseline"]
    why = WORKSPACES.get(row.name) if found < wanted else None
    if why is None and not is_model(row) and found >= LARGE and found < wanted <= found + UNSPLIT:
        why = WHOLE
    return abs(found - wanted) / max(wanted, BLOCK), why


# -- time ----------------------------------------------------------------------------------------------------------


@cache
def _hardware(source, tf32):
    device = cg.load_hardware(source)
    if tf32:  # fp32 matmuls run in TF32 where torch allows it
        peak = {**device.peak, "fp32": device.peak["tf32"]}
        device = replace(device, peak=peak, tables={**device.tables, "peak": peak})
    return device


def hardware_of(record):
    """Return the device for a record's times: from a file next to the record or a datasheet; None if there is
    neither."""
    specification = record.path.with_suffix(".toml")
    source = str(specification) if specification.exists() else SPECIFICATIONS.get(record.environment["device"])
    return None if source is None else _hardware(source, record.environment["tf32"])


def cache_bytes(record):
    """Return the last-level cache bytes: the device's or the file's figure, whichever is larger."""
    table = hardware_of(record).tables.get("cache", {})
    stated = [int(table[key].value) for key in ("l2", "l2_reported_by_driver", "last_level") if key in table]
    return max([*stated, record.environment.get("l2_bytes", 0)])


@dataclass(frozen=True)
class Least:
    """The lower bound on a case's time."""

    seconds: float
    """of the roofline: no run is faster that finds all in memory"""
    warm: float
    """where a case runs again and again: bytes that the last-level cache can hold need not come from memory"""
    bytes: int
    """bytes that have to move"""
    cache: int
    """bytes of the last-level cache"""

    @property
    def within(self):
        """Whether the whole working set fits the last-level cache."""
        return self.bytes <= self.cache

    @property
    def beyond(self):
        """Whether the cache holds at most a quarter of the working set."""
        return self.bytes > 4 * self.cache


@cache
def least(row, record):
    """Return the lower bound on a row's time."""
    graph, sizes = graph_of(row, record.device, held=False)
    hardware = hardware_of(record)
    found, cache_size = cg.roofline(graph, hardware, **sizes), cache_bytes(record)
    bandwidth = float(hardware.bandwidth.value)
    memory = found.fused_bytes / bandwidth
    computes = found.lower_bound > memory * (1 + 1e-9)
    warm = found.lower_bound if computes else max(0, found.fused_bytes - cache_size) / bandwidth
    return Least(found.lower_bound, warm, found.fused_bytes, cache_size)
