"""Symbolic cost model of deep learning: FLOPs, bytes moved, peak memory and roofline as formulas.

Declare a model as a graph of einsum-style ops, or trace it from torch. Every size may be a symbol; results become
numbers once sizes are bound.
"""

from sys import modules as _modules
from typing import TYPE_CHECKING

from . import interruption  # noqa: F401  # before slow imports

# isort: split
from .algebra.extremum import Max, Min
from .algebra.symbols import dims
from .bind.evaluate import compile, evaluate
from .dtypes import (
    DTYPES,
    DType,
    bits_per_element,
    dtype,
)
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
from .ir.graph import VIEWS as _VIEWS
from .ir.graph import Domain, Graph, Tensor, scope
from .ir.graph import public as _public
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
from .notation.lazy_imports import lazy_function as _lazy_function
from .notation.lazy_imports import lazy_getattr as _later
from .notation.validation import guard as _guard
from .ops.einsum import einsum
from .ops.layout import rearrange
from .ops.loops import (
    kernel,
    repeat,
    scan,
)
from .ops.opaque import opaque
from .ops.reduce import reduce
from .report import report

# isort: split
# models use the public names above, and those in nn, ops and plan
from . import models, nn, ops

if TYPE_CHECKING:
    from . import plan
    from .analysis.communication import communication
    from .analysis.compare import compare, compare_weights
    from .analysis.costs import bytes_moved, costs, flops, intensity, matmul_flops
    from .analysis.liveness import saved_bytes
    from .analysis.memory import lifetimes, peak_memory, timeline
    from .analysis.params import cache_bytes, param_bytes, param_count
    from .analysis.regimes import crossover, regimes
    from .analysis.roofline import roofline
    from .analysis.step_time import seconds
    from .analysis.terms import in_terms_of
    from .analysis.tiling import tiling
    from .analysis.training import hardware_flops, hfu, mfu, model_flops, step_tokens
    from .analysis.training_memory import activation_memory, bytes_per_param, saved_state_bytes, state_bytes
    from .bind.grid import sweep
    from .files.checkpoints import read_weights
    from .files.graphs import (
        load,
        save,
    )
    from .hardware.networks import Network, list_networks, load_network
    from .hardware.specs import Hardware, list_hardware, load_hardware
    from .optimizers import SGD, Adafactor, AdaGrad, Adam, AdamW, Lion, Muon, RMSProp
    from .plan.capacity import largest
    from .report.explore import explore
    from .transforms.backward import backward
    from .transforms.checkpoint import Checkpoint, every, every_block, from_start, selective
    from .transforms.fuse import fuse
    from .transforms.inference import (
        decode,
        prefill,
    )
    from .transforms.lora import lora
    from .transforms.loss import chunked_cross_entropy
    from .transforms.offload import offload
    from .transforms.precision import Policy, apply_precision
    from .transforms.quantize import quantize
    from .transforms.reroll import fold
    from .transforms.shard.fsdp_policy import FullyShard
    from .transforms.shard.grad_reduction import Buckets
    from .transforms.shard.parallelize import parallelize
    from .transforms.shard.shard import mesh, shard
    from .transforms.training import training_step
    from .transforms.unroll import unroll
    from .transforms.vjp.table import vjp

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
    "offload",
    "parallelize",
    "quantize",
    "shard",
    "chunked_cross_entropy",
    "lora",
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
    "Buckets",
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

#: Lazily imported names by module, as listed above for type checkers.
_LATER = {
    "plan": "plan",
    "analysis.communication": "communication",
    "analysis.compare": "compare compare_weights",
    "analysis.costs": "bytes_moved costs flops intensity matmul_flops",
    "analysis.regimes": "crossover regimes",
    "analysis.memory": "peak_memory timeline lifetimes",
    "analysis.params": "cache_bytes param_bytes param_count",
    "analysis.roofline": "roofline",
    "analysis.liveness": "saved_bytes",
    "analysis.step_time": "seconds",
    "analysis.terms": "in_terms_of",
    "analysis.tiling": "tiling",
    "analysis.training": "hardware_flops hfu mfu model_flops step_tokens",
    "analysis.training_memory": "activation_memory bytes_per_param saved_state_bytes state_bytes",
    "bind.grid": "sweep",
    "files.checkpoints": "read_weights",
    "files.graphs": "load save",
    "hardware.networks": "Network list_networks load_network",
    "hardware.specs": "Hardware list_hardware load_hardware",
    "optimizers": "SGD Adafactor AdaGrad Adam AdamW Lion Muon RMSProp",
    "plan.capacity": "largest",
    "transforms.backward": "backward",
    "transforms.checkpoint": "Checkpoint every every_block from_start selective",
    "transforms.reroll": "fold",
    "transforms.fuse": "fuse",
    "transforms.inference": "decode prefill",
    "transforms.offload": "offload",
    "transforms.precision": "Policy apply_precision",
    "transforms.quantize": "quantize",
    "transforms.shard.grad_reduction": "Buckets",
    "transforms.shard.fsdp_policy": "FullyShard",
    "transforms.shard.parallelize": "parallelize",
    "transforms.shard.shard": "mesh shard",
    "transforms.loss": "chunked_cross_entropy",
    "transforms.lora": "lora",
    "transforms.training": "training_step",
    "transforms.unroll": "unroll",
    "transforms.vjp.table": "vjp",
    "report.explore": "explore",
}

# reports import graphs and analyses, which show themselves by these functions
_VIEWS.update(
    {
        name: _lazy_function(f"{__name__}.report.{module}", name)
        for module, names in {
            "summary": "summary summary_html",
            "explore": "explore",
            "plots": "plot_roofline plot_throughput plot_timeline plot_validation",
        }.items()
        for name in names.split()
    }
)

#: Used by validation itself, hence not checked.
_INSIDE = ("dims",)


def _entered(found: object) -> object:
    return _guard(_modules[__name__], found, _INSIDE, _public)


for _module in (nn, ops, _modules[__name__]):
    for _name in _module.__all__:
        if _name in vars(_module):
            setattr(_module, _name, _guard(_module, getattr(_module, _name), _INSIDE, _public))

if not TYPE_CHECKING:
    __getattr__ = _later(__name__, _LATER, _entered)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
