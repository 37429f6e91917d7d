"""Links from signatures to other documentation, without a network.

`sphinx.ext.intersphinx` reads the inventories that this module writes, for the names that occur in signatures.
"""

from __future__ import annotations

import zlib
from pathlib import Path

_FUNCTIONS = "library/functions.html#$"
_ABC = "library/collections.abc.html#collections.abc.$"
_TYPING = "library/typing.html#typing.$"
#: Names of each site and their pages, with `$` for the name.
_SITES = {
    "https://docs.python.org/3/": {
        **dict.fromkeys(("int", "float", "bool", "complex"), _FUNCTIONS),
        **dict.fromkeys(("str", "dict", "list", "tuple", "set", "frozenset", "bytes", "slice"), _FUNCTIONS),
        **{f"collections.abc.{n}": _ABC.replace("$", n) for n in (*("Callable", "Collection", "Hashable"),
           *("Iterable", "Iterator", "Mapping", "Sequence"))},
        **{f"typing.{n}": _TYPING.replace("$", n) for n in ("Any", "Literal")},
        "object": _FUNCTIONS,
        "None": "library/constants.html#$",
        "os.PathLike": "library/os.html#$",
        "pathlib.Path": "library/pathlib.html#$",
        "fractions.Fraction": "library/fractions.html#$",
    },
    "https://docs.sympy.org/latest/": {
        "sympy.core.expr.Expr": "modules/core.html#$",
        "sympy.core.symbol.Symbol": "modules/core.html#$",
        "sympy.core.basic.Basic": "modules/core.html#$",
    },
    "https://numpy.org/doc/stable/": {"numpy.ndarray": "reference/generated/$.html"},
    "https://docs.xarray.dev/en/stable/": {"xarray.Dataset": "generated/$.html"},
    "https://matplotlib.org/stable/": {"matplotlib.figure.Figure": "api/figure_api.html#$"},
    "https://docs.pytorch.org/docs/stable/": {
        "torch.nn.Module": "generated/$.html",
        "torch.Tensor": "tensors.html#$",
    },
}  # fmt: skip


def mapping(folder: Path) -> dict[str, tuple[str, str]]:
    """Write the inventories to a folder, and return the mapping that intersphinx expects."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for site, pages in _SITES.items():
        name = site.split("/")[2].replace(".", "-")
        rows = "".join(f"{n} py:class 1 {page.replace('$', n)} -\n" for n, page in pages.items())
        head = (
            f"# Sphinx inventory version 2\n# Project: {name}\n# Version: \n# The remainder is compressed with zlib.\n"
        )
        (folder / f"{name}.inv").write_bytes(head.encode() + zlib.compress(rows.encode()))
        found[name] = (site, str(folder / f"{name}.inv"))
    return found
