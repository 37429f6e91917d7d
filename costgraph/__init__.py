"""Symbolic costs of models: FLOPs, bytes moved, peak memory and roofline as formulas.

A model is declared as a graph of einsum-style ops. What it costs is derived from the graph, with every size a symbol
if one likes, and becomes a number once sizes are bound.
"""

from .analysis.compare import Compared, Comparison, compare
from .analysis.costs import bytes_moved, costs, flops, intensity, matmul_flops
from .analysis.crossover import crossover
from .analysis.lifetimes import Lifetime, lifetimes
from .analysis.memory import Timeline, peak_memory, timeline
from .analysis.params import param_bytes, param_count
from .analysis.roofline import Roofline, RooflineRow, roofline
from .analysis.saved import saved_bytes
from .analysis.table import Cost, CostRow, Costs
from .analysis.training import hardware_flops, hfu, mfu, model_flops, step_tokens
from .analysis.training_memory import StateBytes, activation_memory, bytes_per_param, saved_state_bytes, state_bytes
from .attention import attention
from .bind import compile, evaluate
from .checkpointing import best_interval, checkpoint_for
from .conv import conv, pool
from .domain import Domain
from .dtypes import DTYPES, DType, bits_per_element, dtype
from .errors import (
    BindingError,
    CostGraphError,
    FormatError,
    GraphError,
    PatternError,
    ShapeError,
    SpecError,
    UnsupportedError,
)
from .extremum import Max, Min, regimes
from .graph import Graph
from .hardware import Hardware, list_hardware, load_hardware
from .io import load, save
from .nn import (
    cross_entropy,
    embedding,
    gated_mlp,
    gelu,
    layer_norm,
    linear,
    log_softmax,
    mlp,
    relu,
    rms_norm,
    sigmoid,
    silu,
    softmax,
    tanh,
)
from .ops.blocks import kernel, repeat, scan
from .ops.einsum import einsum
from .ops.index import arange, gather, scatter, take_along
from .ops.keep import keep
from .ops.layout import concat, contiguous_copy, expand, rearrange, reshape, slice_axis, split, stack
from .ops.operators import matmul, transpose
from .ops.pointwise import cast, pointwise
from .ops.reduce import reduce
from .ops.stated import collective, opaque, transfer
from .ops.stochastic import dropout
from .optimizers import SGD, Adafactor, AdaGrad, Adam, AdamW, Lion, Muon, RMSProp
from .planning import (
    LeadingTerm,
    Preflight,
    PreflightCheck,
    dataset_bytes,
    dataset_tokens,
    largest,
    largest_params,
    leading_term,
    preflight,
    training_days,
    training_flops,
    training_seconds,
    training_tokens,
)
from .report import Report, report
from .rotary import rotary, rotary_tables
from .scopes import scope
from .symbols import dims
from .tensor import Tensor
from .transforms.backward import backward
from .transforms.checkpoint import Checkpoint, every, every_block, from_start, selective
from .transforms.fold import fold
from .transforms.fuse import fuse
from .transforms.policy import Policy
from .transforms.precision import apply_precision
from .transforms.training import training_step
from .transforms.unroll import unroll
from .vjp.table import Pull, vjp

# isort: split
# models are written with the public names above
from . import models

__version__ = "0.1.0"

__all__ = [
    "Report",
    "report",
    "models",
    "largest",
    "Compared",
    "Comparison",
    "compare",
    "PreflightCheck",
    "LeadingTerm",
    "Preflight",
    "StateBytes",
    "activation_memory",
    "bytes_per_param",
    "dataset_bytes",
    "dataset_tokens",
    "hardware_flops",
    "hfu",
    "largest_params",
    "leading_term",
    "mfu",
    "model_flops",
    "preflight",
    "saved_state_bytes",
    "state_bytes",
    "step_tokens",
    "training_days",
    "training_flops",
    "training_seconds",
    "training_tokens",
    "fold",
    "fuse",
    "Checkpoint",
    "best_interval",
    "checkpoint_for",
    "Policy",
    "apply_precision",
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
    "save",
    "unroll",
    "vjp",
    "BindingError",
    "Cost",
    "CostGraphError",
    "CostRow",
    "Costs",
    "DTYPES",
    "DType",
    "Domain",
    "FormatError",
    "Graph",
    "GraphError",
    "Hardware",
    "Lifetime",
    "Max",
    "Min",
    "PatternError",
    "Pull",
    "Roofline",
    "RooflineRow",
    "ShapeError",
    "SpecError",
    "Tensor",
    "Timeline",
    "UnsupportedError",
    "arange",
    "attention",
    "bits_per_element",
    "bytes_moved",
    "cast",
    "collective",
    "compile",
    "concat",
    "contiguous_copy",
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
    "expand",
    "flops",
    "gated_mlp",
    "gather",
    "gelu",
    "intensity",
    "keep",
    "kernel",
    "layer_norm",
    "lifetimes",
    "linear",
    "list_hardware",
    "load_hardware",
    "log_softmax",
    "matmul",
    "matmul_flops",
    "mlp",
    "opaque",
    "param_bytes",
    "param_count",
    "peak_memory",
    "pointwise",
    "pool",
    "rearrange",
    "reduce",
    "regimes",
    "relu",
    "repeat",
    "reshape",
    "rms_norm",
    "roofline",
    "saved_bytes",
    "rotary",
    "rotary_tables",
    "scan",
    "scatter",
    "scope",
    "sigmoid",
    "silu",
    "slice_axis",
    "softmax",
    "split",
    "stack",
    "take_along",
    "tanh",
    "timeline",
    "transfer",
    "transpose",
]
