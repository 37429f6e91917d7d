"""Which kernel `scaled_dot_product_attention` takes on a GPU.

The conditions are those of torch 2.13, `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` and its header
`sdp_utils_cpp.h`, in their order, each named here as there; wheels of that release for CUDA 13 bring cuDNN 9.20.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import floor
from typing import Any

import torch

from ....hardware.arch import Arch
from .table import Here, rule, source

__all__ = ["choose"]

aten = torch.ops.aten
_CHOICE = "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp"
_CALL = "aten/src/ATen/native/transformers/attention.cpp, scaled_dot_product_attention"
CUDNN = source("attention: cuDNN", f"{_CHOICE}, check_prefer_cudnn_attention, can_use_cudnn_attention; {_CALL}")
FLASH = source("attention: flash", f"{_CHOICE}, can_use_flash_attention; {_CALL}")
EFFICIENT = source("attention: efficient", f"{_CHOICE}, can_use_mem_efficient_attention; {_CALL}")
MATH = source("attention: math", f"{_CHOICE}, select_sdp_backend; {_CALL}")

_HALF = (torch.float16, torch.bfloat16)
_MOST_AXIS = 65535  # batch entries, and heads, of cuDNN
_MASK_ALIGNMENT = 8  # elements to which rows of a mask are padded


@dataclass(frozen=True)
class Asked:
    """What the function is called with."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    grouped: bool
    """whether keys and values may have fewer heads"""
    arch: Arch

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values."""
        return self.query, self.key, self.value

    @property
    def trains(self) -> bool:
        """Whether there is a gradient."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors)


# -- conditions of several kernels: None, or what does not hold --------------------------------------------------

Check = Callable[[Asked], str | None]


def _four_axes(a: Asked) -> str | None:
    """check_tensor_shapes."""
    return None if all(t.ndim == 4 for t in a.tensors) else "tensors without four axes"


def _last_axis(a: Asked) -> str | None:
    """check_last_dim_stride_equals_1_dense."""
    given = a.tensors if a.mask is None else (*a.tensors, a.mask)
    return None if all(t.stride(-1) == 1 for t in given) else "elements of a row that are no neighbours"


def _batch(a: Asked) -> str | None:
    sizes = [t.shape[0] for t in a.tensors]
    return None if sizes[0] == sizes[1] == sizes[2] else "batches of different sizes"


def _heads(a: Asked, *, grouped: bool, alike: bool = True) -> str | None:
    """check_batch_size_and_num_heads_dense."""
    q, k, v = (t.shape[-3] for t in a.tensors)
    if _batch(a):
        return _batch(a)
    if not (a.grouped and grouped):
        return None if q == k == v else "fewer heads of keys than of queries"
    if (alike and k != v) or q % k or q % v:
        return "numbers of heads that do not divide"
    return None


def _grouped(a: Asked) -> str | None:
    return _heads(a, grouped=True)


def _grouped_apart(a: Asked) -> str | None:
    return _heads(a, grouped=True, alike=False)


def _all_heads(a: Asked) -> str | None:
    return _heads(a, grouped=False)


def _two_bytes(a: Asked) -> str | None:
    """check_dtypes_low_precision."""
    formats = _HALF if a.arch.major >= 8 else _HALF[:1]
    fits = a.query.dtype in formats and len({t.dtype for t in a.tensors}) == 1
    return None if fits else f"{_word(a.query.dtype)} on {a.arch}"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _since(major: int) -> Check:
    return lambda a: None if a.arch.major >= major else str(a.arch)


# -- cuDNN -------------------------------------------------------------------------------------------------------


def _preferred(a: Asked) -> str | None:
    """check_prefer_cudnn_attention: else it stands behind the way without a kernel, which is always there."""
    return None if a.arch.major in (9, 10) else str(a.arch)


def _enabled_cudnn(a: Asked) -> str | None:
    return None if torch._C._get_cudnn_sdp_enabled() else "switched off"


def _mask_shape(a: Asked) -> str | None:
    """check_attn_mask_shape."""
    mask = a.mask
    if mask is None:
        return None
    if mask.requires_grad:
        return "a mask with a gradient"
    wanted = (a.query.shape[0], a.query.shape[1], a.query.shape[2], a.key.shape[2])
    fits = mask.ndim in (2, 4) and all(
        _is(n, 1) or n == m for n, m in zip(mask.shape, wanted[4 - mask.ndim :], strict=True)
    )
    return None if fits else "a mask of another shape"


def _is(n: Any, number: int) -> bool:
    return isinstance(n, int) and n == number


def _dropout_of_cudnn(a: Asked) -> str | None:
    """check_cudnn_dropout."""
    return None if a.dropout * 16 == floor(a.dropout * 16) else "dropout that is no multiple of 1/16"


def _shapes_of_cudnn(a: Asked) -> str | None:
    """check_cudnn_tensor_shapes."""
    d, other = a.query.shape[3], a.value.shape[3]
    most = 128
    if a.arch == Arch(9, 0):
        most = 256
    elif a.arch.major == 10 and (d, other) == (192, 128):
        most = 192
    if d > most or other > most:
        return f"heads of more than {most}"
    if d % 8 or other % 8:
        return "heads that are no multiple of 8"
    if _is(a.key.shape[2], 1):
        return "one key"
    if a.dropout and _is(a.query.shape[2], 1):
        return "one query with dropout"
    return None if all(n <= _MOST_AXIS for n in a.query.shape[:2]) else f"more than {_MOST_AXIS} batch entries or heads"


_OF_CUDNN: tuple[Check, ...] = (
    _preferred, _enabled_cudnn, _four_axes, _two_bytes, _mask_shape, _since(8), _dropout_of_cudnn, _last_axis,
    _grouped_apart, _shapes_of_cudnn,
)  # fmt: skip


# -- flash -------------------------------------------------------------------------------------------------------


def _enabled_flash(a: Asked) -> str | None:
    """check_runtime_disabled_flash."""
    return None if torch._C._get_flash_sdp_enabled() else "switched off"


def _no_mask(a: Asked) -> str | None:
    """check_for_attn_mask."""
    return None if a.mask is None else "a mask"


def _size_of_flash(a: Asked) -> str | None:
    """check_head_dim_size_flash."""
    sizes = [t.shape[-1] for t in a.tensors]
    return None if sizes[0] == sizes[1] == sizes[2] and sizes[0] <= 256 else "heads of more than 256, or not all alike"


def _large_gradient(a: Asked) -> str | None:
    """check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120."""
    small = Arch(8, 6) <= a.arch <= Arch(8, 9) or a.arch.major == 12
    size = a.query.shape[-1]
    fits = not (a.trains and small) or size <= 192 or (not a.dropout and size > 224)
    return None if fits else f"gradients of heads of {size} on {a.arch}"


def _square(a: Asked) -> str | None:
    """check_flash_causal_non_square_seqlens."""
    return None if not a.causal or a.query.shape[-2] == a.key.shape[-2] else "a causal mask that is not square"


_OF_FLASH: tuple[Check, ...] = (
    _enabled_flash, _four_axes, _no_mask, _size_of_flash, _since(8), _large_gradient, _square, _two_bytes, _grouped,
    _last_axis,
)  # fmt: skip


# -- efficient ---------------------------------------------------------------------------------------------------


def _enabled_efficient(a: Asked) -> str | None:
    """check_runtime_disabled_mem_efficient."""
    return None if torch._C._get_mem_efficient_sdp_enabled() else "switched off"


def _alignment(a: Asked) -> int:
    """Return minimum_gemm_alignment: elements."""
    half = a.query.dtype in _HALF
    least = 4 if a.arch.major >= 8 else 1
    return max(least, 128 // (16 if half else 32)) if a.arch.major >= 8 or (a.arch.major == 7 and half) else least


def _size_of_efficient(a: Asked) -> str | None:
    """check_head_dim_size_mem_efficient, check_data_ptr_alignment_mem_efficient."""
    step = _alignment(a)
    q, k, v = (t.shape[-1] for t in a.tensors)
    if q != k or q % step or v % step:
        return f"heads that are no multiple of {step}"
    offsets = [t.storage_offset() for t in a.tensors]
    skewed = a.arch.major >= 8 and any(isinstance(n, int) and n % step for n in offsets)
    return f"storages that begin at no multiple of {step}" if skewed else None


def _formats_of_efficient(a: Asked) -> str | None:
    formats = (torch.float32, *(_HALF if a.arch.major >= 8 else _HALF[:1]))
    return None if a.query.dtype in formats else f"{_word(a.query.dtype)} on {a.arch}"


_OF_EFFICIENT: tuple[Check, ...] = (
    _enabled_efficient, _four_axes, _size_of_efficient, _last_axis, _all_heads, _formats_of_efficient,
)  # fmt: skip

_KERNELS = ((CUDNN, _OF_CUDNN), (FLASH, _OF_FLASH), (EFFICIENT, _OF_EFFICIENT))


def choose(asked: Asked) -> tuple[str, str]:
    """Return the rule of the first kernel whose conditions hold, and why none before it is taken."""
    refused: list[str] = []
    for name, checks in _KERNELS:
        why = next((text for check in checks if (text := check(asked)) is not None), None)
        if why is None:
            return name, "; ".join(refused) or f"the first in torch's order on {asked.arch}"
        refused.append(f"not {name.partition(': ')[2]}: {why}")
    return MATH, "; ".join(refused)


# -- the call ----------------------------------------------------------------------------------------------------


@rule(torch.nn.functional.scaled_dot_product_attention)
def attend(
    here: Here,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Call the kernel that is chosen."""
    asked = Asked(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, here.arch)
    name, why = choose(asked)
    with here.by(name, why):
        return _WAYS[name](asked, scale)


def _added(mask: torch.Tensor | None, dtype: torch.dtype, hidden: float) -> torch.Tensor | None:
    """Return what is added to scores for a mask of flags: convert_boolean_attn_mask."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(hidden, dtype=dtype))


def _by_cudnn(a: Asked, scale: float | None) -> torch.Tensor:
    mask = _added(a.mask, a.query.dtype, -65504.0)
    more = (mask, a.trains, a.dropout, a.causal, False)
    return _first(aten._scaled_dot_product_cudnn_attention(*a.tensors, *more, scale=scale))


def _by_flash(a: Asked, scale: float | None) -> torch.Tensor:
    """Pad heads to a multiple of 8, of which the result is a part."""
    size = a.query.shape[-1]
    scale = size**-0.5 if scale is None else scale
    padded = [torch.nn.functional.pad(t, (0, -size % 8)) if size % 8 else t for t in a.tensors]
    made = _first(aten._scaled_dot_product_flash_attention(*padded, a.dropout, a.causal, False, scale=scale))
    return made[..., :size] if size % 8 else made


def _by_efficient(a: Asked, scale: float | None) -> torch.Tensor:
    mask = _added(a.mask, a.query.dtype, float("-inf"))
    if mask is not None:
        mask = _aligned(mask).expand(*a.query.shape[:3], a.key.shape[2])
    more = (mask, a.trains, a.dropout, a.causal)
    return _first(aten._scaled_dot_product_efficient_attention(*a.tensors, *more, scale=scale))


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask whose rows begin at multiples of 8 elements: preprocess_mask."""
    if mask.stride(-1) == 1 and all(s % _MASK_ALIGNMENT == 0 for s in mask.stride()[:-1]):
        return mask
    length = mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, _MASK_ALIGNMENT - length % _MASK_ALIGNMENT))[..., :length]


def _by_products(a: Asked, scale: float | None) -> torch.Tensor:
    mask = _added(a.mask, a.query.dtype, float("-inf"))
    more = (mask, a.dropout, a.causal, None)
    return _first(aten._scaled_dot_product_attention_math(*a.tensors, *more, scale=scale, enable_gqa=a.grouped))


def _first(made: Any) -> torch.Tensor:
    out: torch.Tensor = made[0]
    return out


_WAYS: dict[str, Callable[[Asked, float | None], torch.Tensor]] = {
    CUDNN: _by_cudnn,
    FLASH: _by_flash,
    EFFICIENT: _by_efficient,
    MATH: _by_products,
}
