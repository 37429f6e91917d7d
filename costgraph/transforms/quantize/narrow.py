"""Number formats that weights, activations and caches are stored in: which go together, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass

from ...algebra.symbols import shown
from ...dtypes import DTYPES, DType
from ...dtypes import dtype as find_dtype
from ...errors import CostGraphError, FormatError
from .mixtures import MIXTURES, Mixture

__all__ = ["Narrow", "activations_format", "cache_format", "mixture_of", "need_common", "weights_format"]


#: Elements that share a scale, and its format, where the library that coined a name has them: bitsandbytes, whose
#: `Params4bit` has `blocksize=64` and keeps `absmax` in fp32 (bitsandbytes/functional.py, `quantize_4bit`).
_COINED = {"nf4": (64, "fp32")}


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
    if found.name in _COINED:
        block, coined = _COINED[found.name]
        group, scale = block if group is None else group, coined if scale is None else scale
    wanted = ("fp32" if group is None else "fp16") if scale is None else scale
    shared = "row" if group is None else f"g{group}"
    try:
        return find_dtype(f"{found.name}_{shared}_{find_dtype(wanted).name}{'_zero' if zero else ''}")
    except CostGraphError:
        expected = "a scale in fp32, fp16, bf16 or fp8" + (", and a zero point of integers alone" if zero else "")
        raise FormatError(
            f"{place} {found.name!r} with scale={shown(wanted)}, zero={zero}, expected {expected}"
        ) from None


def mixture_of(value: object) -> Mixture | None:
    """Return the mixture of that name, None where there is none."""
    return MIXTURES.get(value) if isinstance(value, str) else None


def activations_format(weights: object, value: object) -> DType | None:
    """Return the format of activations, with a scale for each token, None where they stay."""
    if value is None:
        return None
    if weights is None:
        raise FormatError(f"quantize: activations={shown(value)} without weights=, expected a format for both")
    if mixture_of(weights) is not None:
        raise FormatError(f"quantize: activations={shown(value)} with the mixture {weights!r}, expected weights alone")
    found = _narrow("quantize: activations", value)
    return found if found.scale else find_dtype(f"{found.name}_row_fp32")


def cache_format(value: object) -> DType | None:
    """Return the format of caches; integers have a scale for each row, None where they stay."""
    if value is None:
        return None
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
