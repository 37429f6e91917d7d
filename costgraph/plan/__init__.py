"""Planning: what fits, how long a run takes, and which strategy is fastest."""

from sys import modules as _modules

from ..ir.graph import public as _public
from ..notation.validation import guard as _guard
from ..transforms.pipeline_schedules import (
    in_flight,
    schedule,
    sends,
)
from .breakeven import crossovers
from .capacity import (
    dataset_bytes,
    dataset_tokens,
    largest_params,
)
from .checkpointing import best_interval, checkpoint_for
from .cluster import leading_term, run, training_days, training_flops, training_seconds, training_tokens
from .pipeline import bubble, simulate
from .preflight import preflight
from .serving import disaggregated, latency, throughput
from .strategy_search import search

__all__ = [
    "best_interval",
    "bubble",
    "checkpoint_for",
    "crossovers",
    "dataset_bytes",
    "dataset_tokens",
    "disaggregated",
    "in_flight",
    "largest_params",
    "latency",
    "leading_term",
    "preflight",
    "run",
    "schedule",
    "search",
    "sends",
    "simulate",
    "throughput",
    "training_days",
    "training_flops",
    "training_seconds",
    "training_tokens",
]

_here = _modules[__name__]
for _name in __all__:
    setattr(_here, _name, _guard(_here, getattr(_here, _name), around=_public))
