"""Where tensor parallelism has the parameters of known layers, by the ends of their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from ...graph.graph import Graph
from ...graph.tensor import Tensor
from ...ops.moves import Rearrange

__all__ = ["SUMMED", "TENSOR", "axes_of", "is_known", "placed_by_name"]

#: Where tensor parallelism has parameters of the layers of `costgraph.nn`, by the ends of their names: Shoeybi et al.
#: 2019 (arXiv 1909.08053), section 3. Heads, the inner width and the vocabulary are split; what goes back to the width
#: of the model is split along what it sums. kv is tp where ranks have a head of keys and values or more each; of fewer,
#: several ranks have the same one.
_OURS: Mapping[str, str] = {
    "tokens/table": "(v tp) d",
    "head/weight": "d (v tp)",
    "head/bias": "(v tp)",
    "attention/q/weight": "d (h tp) k",
    "attention/q/bias": "(h tp) k",
    "attention/[kv]/weight": "d (g kv) k",
    "attention/[kv]/bias": "(g kv) k",
    "attention/kqv/weight": "d n (h tp) k",
    "attention/kqv/bias": "n (h tp) k",
    "attention/q_b/weight": "c (h tp) k",
    "attention/kv_b/weight": "c (h tp) k",
    "attention/proj/weight": "(e tp) d",
    "cross/[qkv]/weight": "d (h tp) k",
    "cross/[qkv]/bias": "(h tp) k",
    "cross/proj/weight": "(e tp) d",
    "mlp/gate_up/weight": "d (2 f tp)",
    "mlp/gate/weight": "d (f tp)",
    "mlp/up/weight": "d (f tp)",
    "mlp/up/bias": "(f tp)",
    "mlp/down/weight": "(f tp) d",
    "mlp/ffw1/weight": "d (f tp)",
    "mlp/ffw1/bias": "(f tp)",
    "mlp/ffw2/weight": "(f tp) d",
    "shared/gate_up/weight": "d (2 f tp)",
    "shared/gate/weight": "d (f tp)",
    "shared/up/weight": "d (f tp)",
    "shared/down/weight": "(f tp) d",
    "experts/gate_up": "e d (2 f tp)",
    "experts/gate_up_bias": "e (2 f tp)",
    "experts/down": "e (f tp) d",
    "attention/[kv]_cache.kept": "b (g kv) s k",
    "attention/norm_state.kept": "b (h tp) k",
    "attention/state.kept": "b (h tp) k v",
    "cross/[kv]_cache.kept": "b (h tp) s k",
}
#: The same of what `costgraph.torch.trace` finds in models of transformers. torch has the axis first that a layer
#: makes; heads and what they hold are one axis of it. What makes them is split along that, and so is what sums it.
_MADE = (
    "[qkv]_proj", "gate_proj", "up_proj", "fc1", "intermediate/dense", "self/query", "self/key", "self/value",
    "*Attention/[qkv]", "DenseReluDense/wi*", "self_attention/query_key_value", "mlp/dense_h_to_4h",
)  # fmt: skip
_SUMMED = (
    "o_proj", "out_proj", "down_proj", "fc2", "output/dense", "*Attention/o", "DenseReluDense/wo",
    "self_attention/dense", "mlp/dense_4h_to_h",
)  # fmt: skip
_TABLES = ("embed_tokens", "word_embeddings", "wte", "shared", "lm_head", "embed_out")
#: Where tensor parallelism has parameters, by the ends of their names: of the layers of `costgraph.nn`, and of traced
#: models of transformers. An axis stands with those of the mesh that split it, as in `shard`.
TENSOR: Mapping[str, str] = {
    **_OURS,
    **{f"{name}/weight": "(v tp) d" for name in _TABLES},
    **{f"{name}/weight": "(f tp) d" for name in _MADE},
    **{f"{name}/bias": "(f tp)" for name in _MADE},
    **{f"{name}/weight": "d (f tp)" for name in _SUMMED},
    "gate_up_proj/weight": "(2 f tp) d",
    "experts/gate_up_proj": "e (2 f tp) d",
    "experts/down_proj": "e d (f tp)",
    "relative_attention_bias/weight": "n (h tp)",
    "attn/c_attn/weight": "d (3 f tp)",
    "attn/c_attn/bias": "(3 f tp)",
    "mlp/c_fc/weight": "d (f tp)",
    "mlp/c_fc/bias": "(f tp)",
    "c_proj/weight": "(f tp) d",
}
#: Parameters beside which other tensors of the same layer stay whole: queries that share keys stand with these in one
#: tensor, no equal parts of which are heads with their keys.
_BESIDE: Mapping[str, tuple[str, ...]] = {
    "attention/qkv/weight": ("attention/proj/weight", "attention/[kv]_cache.kept"),
    "qkv_proj/weight": ("o_proj/weight",),
    # what chooses experts is whole
    "mlp/experts/gate_up_proj": ("mlp/gate/weight",),
}
#: Layers whose results tensor parallelism sums over its ranks, by the ends of their names: what they sum is split.
SUMMED = (
    *(name.removesuffix("/weight") for name, text in _OURS.items() if name.endswith("/weight") and text[0] == "("),
    *_SUMMED, "c_proj",
)  # fmt: skip


def placed_by_name(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield where tensor parallelism has parameters, and what a step keeps of them in their shape."""
    sources = [t for g in graph.bodies() if not g.fused for t in g.tensors if t.producer is None]
    names = {t.name for t in sources}
    for t in (t for t in sources if t.role in ("param", "state", "gradient", "cache")):
        of, _, _ = t.name.rpartition(".") if t.role in ("state", "gradient") else (t.name, "", "")
        found = next((end for end in TENSOR if fnmatchcase(of, end) or fnmatchcase(of, f"*/{end}")), None)
        if found is None:
            continue
        layer = "/".join([*of.split("/")[: -1 - found.count("/")], ""])
        if any(found in ends and layer + fused in names for fused, ends in _BESIDE.items()):
            continue
        if len(axes_of(TENSOR[found])) == t.ndim - t.storage.pieces:
            yield t.name, _as_stored(t, TENSOR[found])


def is_known(name: str) -> bool:
    """Whether the name of a parameter is that of a known layer: one that stays whole does so for a reason."""
    ends = (*TENSOR, *_BESIDE)
    return any(fnmatchcase(name, end) or fnmatchcase(name, f"*/{end}") for end in ends)


def _as_stored(t: Tensor, text: str) -> str:
    """Return a placement in the order of axes in which `quantize` stores a weight, which readers have as it was."""
    readers = list(t.graph.successors(t))
    kind = readers[0].kind if [op.name for op in readers] == [f"{t.name}.order"] else None
    if not isinstance(kind, Rearrange):
        return text
    words = dict(zip(kind.order, axes_of(text), strict=True))
    return " ".join(words[i] for i in range(len(words)))


def axes_of(text: str) -> list[str]:
    """Return the axes of a placement."""
    out: list[str] = []
    for word in text.split():
        if out and out[-1].startswith("(") and not out[-1].endswith(")"):
            out[-1] += f" {word}"
        else:
            out.append(word)
    return out
