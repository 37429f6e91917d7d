"""Number formats that weights, activations and caches are stored in: which go together, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...algebra.symbols import shown
from ...dtypes import DTYPES, DType
from ...dtypes import dtype as find_dtype
from ...errors import CostGraphError, FormatError
from .mixtures import MIXTURES, Mixture

__all__ = ["Narrow", "activations_format", "cache_format", "mixture_of", "need_common", "weights_format"]


class _Coined(NamedTuple):
    """Default group size and scale format in the library that coined a weight format."""

    group: int
    """elements that share a scale"""
    scale: str
    """scale format"""
    flat: bool
    """whether groups run over the flattened weight and continue across row ends"""


#: bitsandbytes 0.50 (`Params4bit` in nn/modules.py, `quantize_4bit` in functional.py) flattens a weight into 64-element
#: blocks, each with an fp32 `absmax`; its fp4 codebook is E2M1 except for the smallest value. GPTQ, AWQ, torchao
#: (`Int4WeightOnlyConfig`) and compressed-tensors (W4A16) use a group size of 128 for int4 by default.
_COINED = {"nf4": _Coined(64, "fp32", True), "fp4": _Coined(64, "fp32", True), "int4": _Coined(128, "fp16", False)}
#: Kernels and caches use FP4 only with block scales, so `fp4` names a weight format alone.
_NO_FP4 = "nvfp4 or mxfp4, whose blocks have scales, or fp4_e2m1 for elements in one block"


@dataclass(frozen=True)
class Narrow:
    """What is stored in which format; None for what stays."""

    weights: DType | None
    activations: DType | None
    cache: DType | None

    @property
    def product(self) -> DType | None:
        """Format that quantized operands are multiplied in; None for that of the activations."""
        if self.weights is None or self.activations is None:
            return None
        pair = (_bare(self.weights), _bare(self.activations))
        return next(a for a, b in (pair, pair[::-1]) if _holds(a, b))

    def operand(self, stored: DType) -> DType:
        """Format that a quantized operand goes into the product in: as it is where both are as wide."""
        own, found = self.product, _bare(stored)
        return found if own is None or found.bits == own.bits else own


def _narrow(place: str, value: object) -> DType:
    try:
        found = find_dtype(value)
    except CostGraphError as error:
        raise FormatError(f"{place}: {error}") from None
    if found.bits > 8 or found.kind == "bool" or found.name == "fp8_e8m0":
        raise FormatError(f"{place}: {found.name!r}, expected an integer or float of 8 bits or fewer")
    return found


def _bare(found: DType) -> DType:
    """Return the format of the elements alone, where scales were added."""
    return DTYPES[found.element] if found.element else found


def weights_format(value: object, group: object, scale: object, *, zero: bool) -> DType | None:
    """Return the format of weights with its scales, None where they stay."""
    place = "quantize: weights"
    if value is None:
        for name, given in (("group", group), ("scale", scale), ("zero", zero or None)):
            if given is not None:
                raise FormatError(f"quantize: {name}={shown(given)} without weights=, expected a format for them")
        return None
    mixture = mixture_of(value)
    found = _narrow(place, value) if mixture is None else _narrow(place, mixture.base)
    if found.scale:
        for name, given in (("group", group), ("scale", scale), ("zero", zero or None)):
            if given is not None:
                raise FormatError(f"{place} {shown(value)} have scales of their own, expected no {name}=")
        return found if mixture is None else None
    if group is not None and (isinstance(group, bool) or not isinstance(group, int) or group < 1):
        raise FormatError(f"quantize: group={shown(group)}, expected a positive integer")
    coined = _COINED.get(value) if isinstance(value, str) else None
    if coined is not None:
        group, scale = coined.group if group is None else group, coined.scale if scale is None else scale
    wanted = ("fp32" if group is None else "fp16") if scale is None else scale
    shared = "row" if group is None else f"g{group}"
    try:
        more = ("_zero" if zero else "") + ("_flat" if coined is not None and coined.flat else "")
        return find_dtype(f"{found.name}_{shared}_{find_dtype(wanted).name}{more}")
    except CostGraphError:
        expected = "a scale in fp32, fp16, bf16 or fp8" + (", and a zero point of integers alone" if zero else "")
        raise FormatError(
            f"{place} {found.name!r} with scale={shown(wanted)}, zero={zero}, expected {expected}"
        ) from None


def mixture_of(value: object) -> Mixture | None:
    """Return the mixture with this case-insensitive name, None if there is none; number formats take precedence."""
    if not isinstance(value, str) or value in DTYPES:
        return None
    return MIXTURES.get(value) or MIXTURES.get(value.upper())


def activations_format(weights: object, value: object) -> DType | None:
    """Return the format of activations, with a scale for each token, None where they stay."""
    if value is None:
        return None
    if weights is None:
        raise FormatError(f"quantize: activations={shown(value)} without weights=, expected a format for both")
    if mixture_of(weights) is not None:
        raise FormatError(f"quantize: activations={shown(value)} with the mixture {weights!r}, expected weights alone")
    if "fp4" in (weights, value):
        raise FormatError(f"quantize: activations={shown(value)} with weights {shown(weights)}, expected {_NO_FP4}")
    found = _narrow("quantize: activations", value)
    return found if found.scale else find_dtype(f"{found.name}_row_fp32")


def cache_format(value: object) -> DType | None:
    """Return the format of caches; integers have a scale for each row, None where they stay."""
    if value is None:
        return None
    if value == "fp4":
        raise FormatError(f"quantize: cache='fp4', expected {_NO_FP4}")
    found = _narrow("quantize: cache", value)
    return find_dtype(f"{found.name}_row_fp16") if found.kind == "int" and not found.scale else found


def _holds(wide: DType, narrow: DType) -> bool:
    """Whether a format has every value of another one, scales left aside; no unit multiplies values of a table."""
    if wide.codes or narrow.codes:
        return False
    if wide.kind == narrow.kind == "int":
        return wide.bits > narrow.bits or (wide.bits == narrow.bits and wide.signed == narrow.signed)
    if wide.kind == "int" or wide.bits < narrow.bits:
        return False
    if narrow.kind == "int":
        return wide.mantissa + 1 >= narrow.bits - narrow.signed and wide.max >= -narrow.min
    # units multiply the two floats of 8 bits with each other
    return wide.bits == narrow.bits or (wide.exponent >= narrow.exponent and wide.mantissa >= narrow.mantissa)


def need_common(formats: Narrow) -> None:
    """Raise FormatError if there is no format to multiply weights and activations in."""
    assert formats.weights is not None
    assert formats.activations is not None
    one, other = _bare(formats.weights), _bare(formats.activations)
    if not _holds(one, other) and not _holds(other, one):
        raise FormatError(
            f"quantize: weights in {one.name!r} and activations in {other.name!r}: neither holds the values of the "
            f"other, expected one format, or a narrower one that the other holds"
        )
    if one.block != other.block:
        raise FormatError(
            f"quantize: weights in {one.name!r} and activations in {other.name!r}: the matrix unit applies scales of "
            f"blocks, expected blocks of one length on both sides, or on neither"
        )
