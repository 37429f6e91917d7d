"""Symbolic costs of models: FLOPs, bytes moved, peak memory and roofline as formulas.

A model is declared as a graph of einsum-style ops. What it costs is derived from the graph, with every size a symbol
if one likes, and becomes a number once sizes are bound.
"""

from . import interruption  # noqa: F401  # before what takes its time

# isort: split
from .algebra.extremum import Max, Min, regimes
from .algebra.symbols import dims
from .analysis.compare import Compared, Comparison, compare
from .analysis.costs import bytes_moved, costs, flops, intensity, matmul_flops
from .analysis.crossover import crossover
from .analysis.lifetimes import Lifetime, lifetimes
from .analysis.memory import Timeline, peak_memory, timeline
from .analysis.params import cache_bytes, param_bytes, param_count
from .analysis.roofline import Roofline, RooflineRow, roofline
from .analysis.saved import saved_bytes
from .analysis.table import Cost, CostRow, Costs
from .analysis.training import hardware_flops, hfu, mfu, model_flops, step_tokens
from .analysis.training_memory import StateBytes, activation_memory, bytes_per_param, saved_state_bytes, state_bytes
from .bind.evaluate import compile, evaluate
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
from .files.write import load, save
from .graph.changes import keep_whole as _keep_whole
from .graph.domain import Domain
from .graph.graph import Graph
from .graph.scopes import scope
from .graph.tensor import Tensor
from .hardware.specs import Hardware, list_hardware, load_hardware
from .nn.attention import attention, self_attention
from .nn.conv import conv, pool
from .nn.cross_attention import cross_attention
from .nn.embeddings import embedding, patch_embedding, relative_bias, tied_head, timestep_embedding
from .nn.latent import latent_attention
from .nn.linear import (
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
from .nn.losses import binary_cross_entropy, cross_entropy
from .nn.lstm import gru, lstm
from .nn.moe import experts, moe, router
from .nn.norms import batch_norm, group_norm
from .nn.recommendation import dot_interaction, embedding_bag
from .nn.recurrent import causal_conv, cumulative_sum, head_norm, recurrence, scan_kernel, token_shift
from .nn.resizing import adaptive_pool, upsample
from .nn.rotary import rotary, rotary_tables
from .nn.stack import layers
from .nn.vision import inverted_residual, squeeze_excitation, stochastic_depth
from .nn.windows import patch_merging, window_bias, window_merge, window_partition
from .notation.door import guard as _guard
from .ops.blocks import kernel, repeat, scan
from .ops.cached import cache, initial_state
from .ops.einsum import einsum
from .ops.grouped import dispatch, grouped, top_k
from .ops.index import arange, gather, scatter, take_along
from .ops.keep import keep
from .ops.layout import concat, contiguous_copy, expand, rearrange, reshape, roll, slice_axis, split, stack
from .ops.operators import matmul, transpose
from .ops.pointwise import cast, pointwise
from .ops.reduce import reduce
from .ops.stated import collective, opaque, transfer
from .ops.stochastic import dropout
from .optimizers import SGD, Adafactor, AdaGrad, Adam, AdamW, Lion, Muon, RMSProp
from .planning import (
    Latency,
    LeadingTerm,
    Preflight,
    PreflightCheck,
    Throughput,
    ThroughputRow,
    dataset_bytes,
    dataset_tokens,
    largest,
    largest_params,
    latency,
    leading_term,
    preflight,
    throughput,
    training_days,
    training_flops,
    training_seconds,
    training_tokens,
)
from .planning.checkpointing import best_interval, checkpoint_for
from .report import Report, report
from .transforms.backward.backward import backward
from .transforms.checkpoint import Checkpoint, every, every_block, from_start, selective
from .transforms.folding.fold import fold
from .transforms.fuse import fuse
from .transforms.inference.inference import decode, prefill
from .transforms.precision.policy import Policy
from .transforms.precision.precision import apply_precision
from .transforms.quantize.quantize import quantize
from .transforms.training import training_step
from .transforms.unroll import unroll
from .transforms.vjp.table import Pull, vjp

# isort: split
# models are written with the public names above
from . import models

__version__ = "0.1.0"

__all__ = [
    "Report",
    "report",
    "models",
    "largest",
    "layers",
    "Compared",
    "Comparison",
    "compare",
    "PreflightCheck",
    "Latency",
    "LeadingTerm",
    "Preflight",
    "Throughput",
    "ThroughputRow",
    "latency",
    "throughput",
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
    "quantize",
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
    "binary_cross_entropy",
    "dot_interaction",
    "embedding_bag",
    "inverted_residual",
    "roll",
    "patch_merging",
    "squeeze_excitation",
    "stochastic_depth",
    "window_bias",
    "window_merge",
    "window_partition",
    "attention",
    "batch_norm",
    "group_norm",
    "adaptive_pool",
    "upsample",
    "self_attention",
    "cross_attention",
    "patch_embedding",
    "relative_bias",
    "timestep_embedding",
    "tied_head",
    "cache",
    "cache_bytes",
    "decode",
    "prefill",
    "initial_state",
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
    "causal_conv",
    "cumulative_sum",
    "scan_kernel",
    "gru",
    "head_norm",
    "lstm",
    "recurrence",
    "token_shift",
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
    "moe",
    "latent_attention",
    "experts",
    "router",
    "dispatch",
    "grouped",
    "top_k",
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

#: What the library itself makes and calls for every op, and `dims`, which the door stands on.
_INSIDE = [
    "dims", "CostRow", "Lifetime", "RooflineRow", "Tensor", "Graph.unique", "Graph.formal", "Graph.adopt",
    "Graph.capture", "Graph.export", "Graph.add_result", "Graph.add_op", "Graph.add_node", "Graph.start_body",
    "Graph.same", "Graph.told", "Graph.whole", "Graph.note",
]  # fmt: skip

_keep_whole(globals(), __all__)
_guard(globals(), __all__, inside=_INSIDE)
