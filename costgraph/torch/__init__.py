"""Integration with torch: trace, lower, measure and validate. `import costgraph` alone does not import torch."""

from ..errors import UnsupportedError

try:
    import torch as _torch  # noqa: F401  # looked for first, so that the error says what is missing
except ImportError as error:
    raise UnsupportedError(f"costgraph.torch: torch cannot be imported ({error}): pip install torch") from None

from .calibration import (
    Calibration,
    calibrate,
)
from .hf_config import from_config
from .lowering import lower, random_inputs
from .measurement import (
    Measurement,
    environment,
    measure,
)
from .tracing import Dispatched, dispatched, trace
from .validation import (
    Validation,
    validate,
)

__all__ = [
    "Calibration",
    "Dispatched",
    "Measurement",
    "Validation",
    "calibrate",
    "dispatched",
    "environment",
    "from_config",
    "lower",
    "measure",
    "random_inputs",
    "trace",
    "validate",
]
