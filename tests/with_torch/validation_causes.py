"""Known causes of inaccurate peak predictions, by case and device."""

from __future__ import annotations

from costgraph.torch.validation_programs import Case

__all__ = ["CAUSES", "causes"]

CAUSES = {
    "workspace": (
        "the kernel allocates memory that belongs to no tensor: convolutions, fused attention, bf16 matmuls "
        "and transposing copies on a CPU, cuDNN on a GPU"
    ),
    "variables": (
        "a Python variable keeps a tensor until its function returns, or until the next iteration over "
        "parameters; the graph frees it after the last reader"
    ),
    "mask": "eager causal attention reads an (S, S) mask, which the declared graph does not have",
    "statistics": (
        "mean and deviation of a row, or the log-sum-exp of a query: written even if no backward pass reads "
        "them, and in bf16 on a CPU where fp32 is declared"
    ),
    "RMS norm": "declared as one kernel; without such a kernel, PyTorch runs and saves its ops",
    "heads": "shared keys and values are copied for each head",
    "rotary": "declared as one kernel; PyTorch runs and saves its ops",
    "lowering": (
        "a lowered graph runs op by op: it converts operands to the format of the computation, and copies "
        "those with strides that a matmul cannot read"
    ),
}
"""Explanation of each cause."""

_CPU_KERNELS = ("transpose", "attention flash", "attention flash causal")


def causes(case: Case, device: str, which: str = "declared") -> list[str]:
    """Return the causes that make a prediction lower or higher than the measurement.

    Parameters
    ----------
    case : Case
        The measured case.
    device : str
        cpu or cuda.
    which : str
        declared or traced: workspaces alone do not affect the latter.
    """
    plain = case.program == "module"
    applicable = {
        "workspace": _workspace(case, device),
        "variables": plain
        and (case.mode == "forward" or case.implementation == "for-loop" or case.optimizer == "Adafactor"),
        "mask": plain and case.attention == "eager",
        "statistics": case.subject in ("layer norm", "attention flash", "attention flash causal")
        or (device == "cpu" and case.mode == "step" and case.dtype == "bf16"),
        "RMS norm": case.subject in ("rms norm", "llama", "llama block"),
        "heads": case.subject in ("llama", "llama block"),
        "rotary": case.subject == "llama",
        "lowering": not plain and (case.precision not in ("", "fp32") or case.optimizer == "Muon"),
    }
    assert list(applicable) == list(CAUSES)
    return [name for name, there in applicable.items() if there and (which == "declared" or name == "workspace")]


def _workspace(case: Case, device: str) -> bool:
    if case.subject.startswith("convolution"):
        return True
    if device == "cuda":
        return case.subject == "attention flash" or case.subject.startswith("sum")
    products = case.dtype == "bf16" or "bf16" in case.precision or case.precision in ("fp16-mixed", "fp8")
    return case.subject in _CPU_KERNELS or products or (case.attention == "flash" and case.mode == "forward")
