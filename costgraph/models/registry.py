"""Names of models, and what declares each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from numbers import Real

from ..arguments import need_flag
from ..dtypes import DType
from ..dtypes import dtype as find_dtype
from ..errors import FormatError, GraphError
from ..graph import Graph
from ..symbols import shown
from . import gpt2, llama, mlp

__all__ = ["load", "names"]

_Declare = Callable[[str, str, float, str], Graph]

#: What declares a family, what declares it as eager code runs it, and the sizes of its models.
_FAMILIES: tuple[tuple[_Declare, _Declare, Mapping[str, Mapping[str, int]]], ...] = (
    (gpt2.gpt2, gpt2.composed_gpt2, gpt2.PRESETS),
    (llama.llama, llama.composed_llama, llama.PRESETS),
    (mlp.mlp, mlp.mlp, mlp.PRESETS),  # an op for each of its modules as it is
)

#: What declares a model, in both ways, and the sizes that it binds, by name.
_MODELS = {name: (*both, sizes) for *both, presets in _FAMILIES for name, sizes in presets.items()}


def names() -> list[str]:
    """List the models that `load` knows.

    Returns
    -------
    list of str
        In alphabetical order.

    Examples
    --------
    >>> import costgraph as cg
    >>> [name for name in cg.models.names() if name.startswith("gpt")]
    ['gpt2', 'gpt2-large', 'gpt2-medium', 'gpt2-xl', 'gpt3-175b']
    """
    return sorted(_MODELS)


def load(
    name: str,
    symbolic: bool = False,
    attention: str = "flash",
    dropout: float = 0,
    dtype: str | DType = "bf16",
    composed: bool = False,
) -> Graph:
    """Declare a model: a symbolic graph whose `defaults` bind the published sizes.

    Parameters
    ----------
    name : str
        One of `names()`.
    symbolic : bool
        Leave every size open, depth included.
    attention : str
        flash: one kernel that computes the pairs of the causal mask. eager: an op each for scores, scale,
        mask, softmax and reduction. Models without attention take either.
    dropout : float
        Probability, wherever the reference module drops out when it trains.
    dtype : str or DType
        Floating format of parameters and activations.
    composed : bool
        As the eager code of the reference module runs it: functions that it composes of several ops are those ops,
        and tensors that its Python variables name live as long. By default they are one kernel, and a tensor dies
        after the last op that reads it.

    Returns
    -------
    Graph
        From tokens (B, S), or features (B, D), to logits, with `loss` named and not part of the graph. B and
        S are open; any default can be overridden where a question is asked.

    Raises
    ------
    GraphError
        If the model is unknown, or `attention`, `dropout` or `composed` is none.
    FormatError
        If the number format is unknown, or holds no fractions.

    Examples
    --------
    >>> import costgraph as cg
    >>> g = cg.models.load("llama-3-8b")
    >>> cg.param_count(g), cg.matmul_flops(g, B=1, S=8192)
    (8030261248, 140550657277952)
    >>> cg.param_count(g, L=1)
    1268789248
    >>> cg.param_count(cg.models.load("mlp", symbolic=True))
    C*F + C + D*F + F**2*L + F*L + F
    """
    if not isinstance(name, str) or name not in _MODELS:
        near = get_close_matches(shown(name).lower().strip("'"), _MODELS, n=4, cutoff=0.5)
        raise GraphError(f"model {shown(name)}: unknown, expected one of {', '.join(near or names())}")
    if not isinstance(attention, str) or attention not in ("flash", "eager"):
        raise GraphError(f"model {name!r}: attention {shown(attention)}, expected 'flash' or 'eager'")
    if isinstance(dropout, bool) or not isinstance(dropout, Real) or not 0 <= dropout < 1:
        raise GraphError(f"model {name!r}: dropout {shown(dropout)}, expected a number from 0 to below 1")
    need_flag(f"model {name!r}", composed=composed)
    format_ = find_dtype(dtype)
    if format_.kind != "float":
        raise FormatError(f"model {name!r}: dtype {format_.name!r}, expected a floating format")
    declare, declare_composed, sizes = _MODELS[name]
    graph = (declare_composed if composed else declare)(name, attention, dropout, format_.name)
    if not symbolic:
        graph.defaults.update(sizes)
    return graph
