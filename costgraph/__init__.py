"""Symbolic costs of models: FLOPs, bytes moved, peak memory and roofline as formulas.

A model is declared as a graph of einsum-style ops. What it costs is derived from the graph, with every size a symbol
if one likes, and becomes a number once sizes are bound.
"""

from sys import modules as _modules

from . import interruption  # noqa: F401  # before what takes its time

# isort: split
from .algebra.extremum import Max, Min
from .algebra.symbols import dims
from .analysis.communication import communication
from .analysis.compare import compare
from .analysis.costs import bytes_moved, costs, flops, intensity, matmul_flops
from .analysis.crossover import crossover
from .analysis.memory import peak_memory, timeline
from .analysis.params import cache_bytes, param_bytes, param_count
from .analysis.regimes import regimes
from .analysis.roofline import roofline
from .analysis.saved import saved_bytes
from .analysis.seconds import seconds
from .analysis.storages import lifetimes
from .analysis.terms import in_terms_of
from .analysis.tiling import tiling
from .analysis.training import hardware_flops, hfu, mfu, model_flops, step_tokens
from .analysis.training_memory import activation_memory, bytes_per_param, saved_state_bytes, state_bytes
from .analysis.weights import compare_weights
from .bind.evaluate import compile, evaluate
from .bind.grid import sweep
from .dtypes import DTYPES, DType, bits_per_element, dtype
from .errors import (
    BindingError,
    CostGraphError,
    FormatError,
    GraphError,
    PatternError,
    ShapeError,
    SpecError,
    StandInWarning,
    UnsupportedError,
)
from .files.weights import read_weights
from .files.write import load, save
from .graph.changes import whole as _whole
from .graph.domain import Domain
from .graph.graph import Graph
from .graph.scopes import scope
from .graph.tensor import Tensor
from .hardware.networks import Network, list_networks, load_network
from .hardware.specs import Hardware, list_hardware, load_hardware
from .nn import (
    attention,
    conv,
    cross_entropy,
    dropout,
    embedding,
    gelu,
    layer_norm,
    linear,
    relu,
    rms_norm,
    sigmoid,
    silu,
    softmax,
    tanh,
)
from .notation.door import guard as _guard
from .ops.blocks import kernel, repeat, scan
from .ops.einsum import einsum
from .ops.layout import rearrange
from .ops.reduce import reduce
from .ops.stated import opaque
from .optimizers import SGD, Adafactor, AdaGrad, Adam, AdamW, Lion, Muon, RMSProp
from .plan.search import largest
from .report import report
from .transforms.backward.backward import backward
from .transforms.checkpoint import Checkpoint, every, every_block, from_start, selective
from .transforms.folding.fold import fold
from .transforms.fuse import fuse
from .transforms.inference.inference import decode, prefill
from .transforms.precision.policy import Policy
from .transforms.precision.precision import apply_precision
from .transforms.quantize.quantize import quantize
from .transforms.shard.fully import FullyShard
from .transforms.shard.parallelize import parallelize
from .transforms.shard.shard import mesh, shard
from .transforms.training import training_step
from .transforms.unroll import unroll
from .transforms.vjp.table import vjp

# isort: split
# models are written with the public names above, and those of nn, ops and plan
from . import models, nn, ops, plan
from .report.explore import explore

__version__ = "0.1.0"

__all__ = [
    "report",
    "models",
    "nn",
    "ops",
    "plan",
    "largest",
    "communication",
    "compare",
    "compare_weights",
    "tiling",
    "activation_memory",
    "bytes_per_param",
    "hardware_flops",
    "hfu",
    "mfu",
    "model_flops",
    "saved_state_bytes",
    "state_bytes",
    "step_tokens",
    "fold",
    "fuse",
    "Checkpoint",
    "Policy",
    "apply_precision",
    "mesh",
    "parallelize",
    "quantize",
    "shard",
    "training_step",
    "SGD",
    "AdaGrad",
    "Adafactor",
    "Adam",
    "AdamW",
    "Lion",
    "Muon",
    "RMSProp",
    "backward",
    "every",
    "every_block",
    "from_start",
    "selective",
    "load",
    "read_weights",
    "save",
    "unroll",
    "vjp",
    "BindingError",
    "CostGraphError",
    "DTYPES",
    "DType",
    "Domain",
    "FormatError",
    "FullyShard",
    "Graph",
    "GraphError",
    "Hardware",
    "Max",
    "Min",
    "Network",
    "PatternError",
    "ShapeError",
    "SpecError",
    "StandInWarning",
    "Tensor",
    "UnsupportedError",
    "attention",
    "cache_bytes",
    "decode",
    "prefill",
    "bits_per_element",
    "bytes_moved",
    "compile",
    "conv",
    "costs",
    "cross_entropy",
    "crossover",
    "dims",
    "dropout",
    "dtype",
    "einsum",
    "embedding",
    "evaluate",
    "explore",
    "flops",
    "gelu",
    "in_terms_of",
    "intensity",
    "kernel",
    "layer_norm",
    "lifetimes",
    "linear",
    "list_hardware",
    "list_networks",
    "load_hardware",
    "load_network",
    "matmul_flops",
    "opaque",
    "param_bytes",
    "param_count",
    "peak_memory",
    "rearrange",
    "reduce",
    "regimes",
    "relu",
    "repeat",
    "rms_norm",
    "roofline",
    "saved_bytes",
    "scan",
    "scope",
    "seconds",
    "sigmoid",
    "silu",
    "softmax",
    "sweep",
    "tanh",
    "timeline",
]

#: What the library itself makes and calls for every op, and `dims`, which the door stands on.
_INSIDE = [
    "dims", "CostRow", "Lifetime", "RooflineRow", "Tensor", "Graph.unique", "Graph.formal", "Graph.adopt",
    "Graph.capture", "Graph.export", "Graph.add_result", "Graph.add_op", "Graph.add_node", "Graph.start_body",
    "Graph.same", "Graph.told", "Graph.whole", "Graph.note",
]  # fmt: skip

#: What questions answer with, by module.
_RECORDS = {
    "analysis.compare": ("Compared", "Comparison"),
    "analysis.memory": ("Timeline",),
    "analysis.roofline": ("Roofline", "RooflineRow"),
    "analysis.storages": ("Lifetime",),
    "analysis.table": ("Cost", "CostRow", "Costs"),
    "analysis.training_memory": ("StateBytes",),
    "analysis.weights": ("WeightComparison", "WeightDifference"),
    "files.weights": ("Weight", "Weights"),
    "plan.amounts": ("LeadingTerm",),
    "plan.cluster": ("Run",),
    "plan.preflight": ("Preflight", "PreflightCheck"),
    "plan.serving": ("Latency", "Throughput", "ThroughputRow"),
    "report.collect": ("Report",),
    "transforms.schedules": ("Action",),
    "transforms.vjp.table": ("Pull",),
}

_guard([nn, ops, plan, _modules[__name__]], _RECORDS, inside=_INSIDE, around=_whole)
