"""Mixtures: which of a model's matrices has which format, by what it is and by the layer that it is in.

Source: llama.cpp, src/llama-quant.cpp (`llama_tensor_get_type_impl` and `tensor_type_fallback`, commit 007dbbf3),
without an importance matrix. What it decides by the name of an architecture is left out. Projections of queries, keys
and values in one matrix have the formats of its branch for them, as published files do: that commit takes them for
values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = ["FALLBACKS", "MIXTURES", "ROLES", "Mixture", "Model"]

#: What a matrix is by the last levels of its name, as the layers of `costgraph.nn` and the zoo give them.
ROLES: Mapping[tuple[str, ...], str] = MappingProxyType({
    ("attention", "q", "weight"): "query", ("attention", "k", "weight"): "key",
    **{("attention", name, "weight"): "value" for name in ("v", "kv_b")},
    **{("attention", name, "weight"): "packed" for name in ("qkv", "kqv")},
    ("attention", "proj", "weight"): "output",
    **{("mlp", name, "weight"): "down" for name in ("down", "ffw2")},
    ("moe", "experts", "down"): "down", ("shared", "down", "weight"): "down",
})  # fmt: skip

#: What stands for a format whose blocks a row is no multiple of, and for that one too.
FALLBACKS: Mapping[str, str] = MappingProxyType(
    {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
)

#: Whether layer i of n has the format of a rule.
Layers = Callable[[int, int], bool]


def _more(i: int, n: int) -> bool:
    """Whether a layer gets more bits: the first and the last eighth, and every third one between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


@dataclass(frozen=True)
class Model:
    """What rules ask of a model."""

    layers: int
    """how many there are"""
    experts: int
    """of each layer, 1 where there are none"""
    shared: int
    """heads of queries to one of values; 1 where projections are not apart"""


@dataclass(frozen=True)
class Mixture:
    """Formats of a model's matrices; norms, biases, routers and tables of positions stay."""

    base: str
    """format of what no rule names"""
    rules: Mapping[str, tuple[tuple[str, Layers], ...]] = field(default_factory=dict)
    """role to formats, each with its layers: the first that fits counts"""
    grouped: str = ""
    """format of values where four heads of queries or more share one"""
    eight: str = ""
    """format of the output of attention beside eight experts"""

    @property
    def layered(self) -> bool:
        """Whether anything depends on how many layers there are."""
        return bool(self.rules) or self.base in _WIDENED

    def format(self, role: str, i: int, model: Model) -> str:
        """Return the format of a matrix in the i-th layer that has one of its role."""
        if role == "head":
            return self.base if self.base == "q8_0" else "q6_k"
        if model.experts == 8 and role in ("key", "value"):
            return "q8_0"
        if role == "output" and model.experts == 8:
            return self.eight or self.base
        fits = (name for name, layers in self.rules.get(role, ()) if layers(i, model.layers))
        found = next(fits, self.base)
        if role != "value":
            return found
        found = self.grouped if self.grouped and model.shared >= 4 else found
        return "q5_k" if found in _WIDENED and model.layers == 80 and model.shared > 1 else found


#: Formats of values that a model of 80 layers, whose heads share them, has in more bits.
_WIDENED = ("q3_k", "q4_k")


def _all(name: str) -> tuple[tuple[str, Layers], ...]:
    return ((name, lambda i, n: True),)


def _first(name: str, layers: Layers) -> tuple[tuple[str, Layers], ...]:
    return ((name, layers),)


_MIXTURES = {
    **{name.upper(): Mixture(name) for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q6_k")},
    "Q2_K": Mixture("q2_k", {"value": _all("q3_k"), "down": _all("q3_k"), "output": _all("q3_k")}, "q4_k", "q5_k"),
    "Q3_K_S": Mixture("q3_k", eight="q5_k"),
    "Q3_K_M": Mixture("q3_k", {
        "value": (*_first("q5_k", lambda i, n: i < 2), *_all("q4_k")),
        "down": (*_first("q5_k", lambda i, n: i < n // 16), *_all("q4_k")),
        "output": _all("q4_k"), "packed": _all("q4_k"),
    }, eight="q5_k"),
    "Q3_K_L": Mixture("q3_k", {
        **{role: _all("q5_k") for role in ("value", "down", "output")}, "packed": _all("q4_k"),
    }),
    "Q4_K_S": Mixture("q4_k", {
        "value": _first("q5_k", lambda i, n: i < 4), "down": _first("q5_k", lambda i, n: i < n // 8),
    }, eight="q5_k"),
    "Q4_K_M": Mixture("q4_k", {
        **{role: _first("q6_k", _more) for role in ("value", "down")}, "packed": _all("q5_k"),
    }, eight="q5_k"),
    "Q5_K_S": Mixture("q5_k"),
    "Q5_K_M": Mixture("q5_k", {
        **{role: _first("q6_k", _more) for role in ("value", "down")}, "packed": _all("q6_k"),
    }),
}  # fmt: skip

MIXTURES: Mapping[str, Mixture] = MappingProxyType(
    _MIXTURES | {name: _MIXTURES[f"{name}_M"] for name in ("Q3_K", "Q4_K", "Q5_K")}  # as llama-quantize reads them
)
"""Every mixture by the name that files of it have."""
