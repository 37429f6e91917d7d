"""The suite of cases of a device: small ones for a processor, large ones for a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from .case import Case
from .models import OPTIMIZERS

__all__ = ["suite"]

Sizes = Mapping[str, int]

_PRODUCTS: dict[str, list[tuple[str, tuple[int, int, int]]]] = {
    # squares from far below the ridge point to far above it, and one row or a few against a large matrix
    "cpu": [
        ("fp32", (64, 64, 64)), ("fp32", (256, 256, 256)), ("fp32", (1024, 1024, 1024)), ("fp32", (1021, 523, 257)),
        ("fp32", (1, 6144, 6144)), ("fp32", (16, 6144, 6144)), ("bf16", (256, 256, 256)), ("bf16", (1024, 1024, 1024)),
        ("bf16", (1, 8192, 8192)), ("fp64", (512, 512, 512)),
    ],
    "cuda": [
        ("fp32", (512, 512, 512)), ("fp32", (4096, 4096, 4096)), ("fp32", (1, 16384, 16384)),
        ("bf16", (128, 128, 128)), ("bf16", (512, 512, 512)), ("bf16", (1024, 1024, 1024)),
        ("bf16", (2048, 2048, 2048)), ("bf16", (4096, 4096, 4096)), ("bf16", (8192, 8192, 8192)),
        ("bf16", (16384, 16384, 16384)), ("bf16", (1, 16384, 16384)), ("bf16", (16, 16384, 16384)),
        ("bf16", (128, 16384, 16384)), ("bf16", (701, 4093, 2039)), ("fp16", (8192, 8192, 8192)),
        ("fp64", (4096, 4096, 4096)),
    ],
}  # fmt: skip

#: Elementwise work, reductions and norms: rows and columns within the cache, and beyond it.
_CELLS: dict[str, list[tuple[int, int]]] = {
    "cpu": [(61, 1024), (34003, 1024)],
    "cuda": [(61, 1024), (4096, 4096), (65536, 8192)],
}
_CELLED = [
    "add", "relu", "gelu", "silu", "exp", "transpose", "sum of rows", "sum of columns", "max of rows", "softmax",
    "layer norm", "rms norm", "cross entropy",
]  # fmt: skip

_OTHERS: dict[str, list[Case]] = {
    "cpu": [
        Case("batched matmul", {"B": 7, "M": 128, "K": 96, "N": 160}),
        Case("linear", {"M": 509, "K": 512, "N": 1024}),
        Case("linear", {"M": 509, "K": 512, "N": 1024}, dtype="bf16"),
        Case("embedding", {"V": 50257, "C": 256, "R": 4093}),
        Case("embedding", {"V": 50257, "C": 768, "R": 32768}),
        *(
            Case(f"attention {kernel}", {"B": 2, "H": 4, "S": S, "K": 64})
            for kernel in ("eager", "flash", "flash causal")
            for S in (127, 1024)
        ),
        Case("convolution 1x1", {"B": 4, "C": 64, "O": 128, "X": 28}),
        Case("convolution 3x3", {"B": 4, "C": 64, "O": 64, "X": 28}),
        Case("convolution 3x3", {"B": 16, "C": 128, "O": 128, "X": 28}),
        Case("convolution depthwise 3x3", {"B": 4, "C": 64, "X": 56}),
    ],
    "cuda": [
        Case("batched matmul", {"B": 128, "M": 1024, "K": 64, "N": 1024}, dtype="bf16"),
        Case("linear", {"M": 16384, "K": 4096, "N": 11008}, dtype="bf16"),
        Case("embedding", {"V": 128256, "C": 4096, "R": 16384}, dtype="bf16"),
        *(
            Case(f"attention {kernel}", {"B": 8, "H": 16, "S": S, "K": 64}, dtype="bf16")
            for kernel in ("eager", "flash", "flash causal")
            for S in (257, 1024, 4096)
        ),
        Case("convolution 1x1", {"B": 64, "C": 256, "O": 256, "X": 56}, dtype="bf16"),
        Case("convolution 3x3", {"B": 64, "C": 64, "O": 64, "X": 56}, dtype="bf16"),
        Case("convolution 3x3", {"B": 64, "C": 256, "O": 256, "X": 56}, dtype="bf16"),
        Case("convolution depthwise 3x3", {"B": 64, "C": 128, "X": 56}, dtype="bf16"),
    ],
}

_GPT: dict[str, Sizes] = {
    "cpu": {"B": 2, "S": 127, "D": 128, "H": 4, "F": 512, "L": 2, "V": 1009, "P": 128},
    "cuda": {"B": 8, "S": 1024, "D": 1024, "H": 16, "F": 4096, "L": 8, "V": 50257, "P": 1024},
}
_LLAMA: dict[str, Sizes] = {
    "cpu": {"B": 2, "S": 127, "D": 128, "H": 4, "G": 2, "K": 32, "F": 352, "L": 2, "V": 1009},
    "cuda": {"B": 4, "S": 1024, "D": 1024, "H": 16, "G": 4, "K": 64, "F": 2816, "L": 8, "V": 32000},
}
_PERCEPTRON: dict[str, Sizes] = {
    "cpu": {"B": 251, "D": 256, "F": 512, "L": 2, "C": 101},
    "cuda": {"B": 8192, "D": 4096, "F": 8192, "L": 4, "C": 1000},
}
_CONVOLUTIONS: dict[str, Sizes] = {
    "cpu": {"B": 8, "C": 3, "X": 32, "D": 32, "L": 2, "V": 101},
    "cuda": {"B": 64, "C": 3, "X": 112, "D": 128, "L": 4, "V": 1000},
}
#: What torch has no program for runs as the lowered graph.
_LOWERED = ("fp32", "bf16", "bf16-master", "fp16-mixed", "megatron-bf16", "fp8")


def suite(device: str = "cpu", *, quick: bool = False) -> list[Case]:
    """Return the cases of a device.

    Parameters
    ----------
    device : str
        cpu or cuda, which decides the sizes.
    quick : bool
        A cheap case of each kind alone.

    Returns
    -------
    list of Case
        Ops, then forward passes, then training steps.

    Examples
    --------
    >>> len(suite("cpu")) >= 40 and len(suite("cuda")) >= 40
    True
    >>> sorted({case.mode for case in suite("cpu", quick=True)})
    ['forward', 'kernel', 'step']
    """
    cases = [*_kernels(device), *_forwards(device), *_steps(device)]
    return list(_cheap(cases)) if quick else cases


def _kernels(device: str) -> Iterator[Case]:
    for dtype, (m, k, n) in _PRODUCTS[device]:
        yield Case("matmul", {"M": m, "K": k, "N": n}, dtype=dtype)
    for subject in _CELLED:
        for rows, columns in _CELLS[device]:
            yield Case(subject, {"R": rows, "C": columns})
    if device == "cuda":
        for subject in ("add", "softmax", "layer norm"):
            yield Case(subject, {"R": 65536, "C": 8192}, dtype="bf16")
    yield from _OTHERS[device]


def _forwards(device: str) -> Iterator[Case]:
    dtype = "fp32" if device == "cpu" else "bf16"
    gpt, llama = _GPT[device], _LLAMA[device]
    yield Case("perceptron", _PERCEPTRON[device], mode="forward", dtype=dtype)
    yield Case("convolutions", _CONVOLUTIONS[device], mode="forward", dtype=dtype)
    yield Case("gpt block", {k: gpt[k] for k in "BSDHF"}, mode="forward", dtype=dtype)
    yield Case("llama block", {k: llama[k] for k in "BSDHGKF"}, mode="forward", dtype=dtype)
    for attention in ("eager", "flash"):
        yield Case("gpt", gpt, mode="forward", dtype=dtype, attention=attention)
        yield Case("llama", llama, mode="forward", dtype=dtype, attention=attention)


def _steps(device: str) -> Iterator[Case]:
    mlp = Case("perceptron", _PERCEPTRON[device], mode="step", optimizer="SGD", implementation="foreach")
    for name, (ours, theirs) in OPTIMIZERS.items():
        for implementation in ours().available:
            # torch has no fused AdaGrad on CUDA
            if (name, implementation, device) != ("AdaGrad", "fused", "cuda"):
                program = "lowered" if theirs is None else "module"
                yield replace(mlp, optimizer=name, implementation=implementation, program=program)
    yield replace(mlp, subject="convolutions", sizes=_CONVOLUTIONS[device], optimizer="SGD-momentum")
    adamw = {"optimizer": "AdamW", "implementation": "foreach", "mode": "step"}
    gpt = Case("gpt", _GPT[device], attention="eager", **adamw)
    llama = Case("llama", _LLAMA[device], attention="eager", **adamw)
    for case in (gpt, llama):
        for attention in ("eager", "flash"):
            yield replace(case, attention=attention)
    for implementation in ("for-loop", "fused"):
        yield replace(gpt, implementation=implementation)
    yield replace(gpt, dtype="bf16", attention="flash", implementation="fused")
    for case in (gpt, llama):
        yield replace(case, precision="bf16-mixed", attention="flash")
    for precision in _LOWERED:
        yield replace(gpt, precision=precision, program="lowered", attention="flash")
    for policy in ("every-block", "selective"):
        yield replace(gpt, checkpoint=policy)
    # as many more forward passes as the layer is far from the first: torch has nothing like it
    yield replace(gpt, checkpoint="from-start", program="lowered")
    deeper = {**_GPT[device], "L": 4}
    yield replace(gpt, checkpoint="every-2", sizes=deeper)
    yield replace(llama, checkpoint="every-block", attention="flash")
    yield replace(gpt, precision="bf16-mixed", checkpoint="every-block", attention="flash")


def _cheap(cases: list[Case]) -> Iterator[Case]:
    """Keep the first case of each subject and mode, and of each policy of precision and of checkpointing."""
    seen = set()
    for case in cases:
        policy = (case.precision, case.checkpoint)
        kind = policy if any(policy) else (case.subject, case.mode)
        if kind not in seen and case.program == "module":
            seen.add(kind)
            yield case
