"""Symbolic costs of models: FLOPs, bytes moved and peak memory as formulas."""

from .analysis.costs import Cost, CostRow, Costs, bytes_moved, costs, flops, intensity, matmul_flops
from .analysis.lifetimes import lifetimes
from .analysis.memory import peak_memory, timeline
from .analysis.params import param_bytes, param_count
from .attention import attention
from .bind import compile, evaluate
from .conv import conv, pool
from .domain import Domain
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
from .graph import Graph, scope
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
    rotary,
    rotary_tables,
    sigmoid,
    silu,
    softmax,
    tanh,
)
from .ops.blocks import kernel, repeat, scan
from .ops.einsum import einsum
from .ops.index import arange, gather, scatter, take_along
from .ops.layout import concat, expand, rearrange, reshape, slice_axis, split, stack
from .ops.operators import matmul, transpose
from .ops.pointwise import cast, pointwise
from .ops.reduce import reduce
from .ops.stated import collective, opaque, transfer
from .ops.stochastic import dropout
from .symbols import dims
