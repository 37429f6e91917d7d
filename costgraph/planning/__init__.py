"""Questions of planning: how large, how long, and whether it fits at all."""

from .amounts import (
    LeadingTerm,
    leading_term,
    training_days,
    training_flops,
    training_seconds,
    training_tokens,
)
from .preflight import Preflight, PreflightCheck, preflight
from .room import dataset_bytes, dataset_tokens, largest_params
from .search import largest
from .serving import Latency, Throughput, ThroughputRow, latency, throughput

__all__ = [
    "PreflightCheck",
    "Latency",
    "LeadingTerm",
    "Preflight",
    "Throughput",
    "ThroughputRow",
    "dataset_bytes",
    "dataset_tokens",
    "largest",
    "latency",
    "largest_params",
    "leading_term",
    "preflight",
    "throughput",
    "training_days",
    "training_flops",
    "training_seconds",
    "training_tokens",
]
