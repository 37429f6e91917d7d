"""Questions of planning: how large, how long, and whether it fits at all."""

from sys import modules as _modules

from ..graph.changes import whole as _whole
from ..notation.door import guard as _guard
from ..transforms.in_flight import in_flight, sends
from ..transforms.schedules import schedule
from .amounts import (
    leading_term,
    training_days,
    training_flops,
    training_seconds,
    training_tokens,
)
from .checkpointing import best_interval, checkpoint_for
from .cluster import run
from .crossing import crossovers
from .disaggregation import disaggregated
from .pipeline import bubble, simulate
from .preflight import preflight
from .room import dataset_bytes, dataset_tokens, largest_params
from .searching import search
from .serving import latency, throughput

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
    setattr(_here, _name, _guard(_here, getattr(_here, _name), around=_whole))
