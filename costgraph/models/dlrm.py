"""DLRM: embedding tables, an MLP for dense features, and pairwise dot products.

Naumov et al. 2019 (arXiv 1906.00091). Sizes and order of ops: `dlrm_s_pytorch.py` of facebookresearch/dlrm; dlrm-mlperf
is the MLPerf benchmark on Criteo Terabyte (`bench/run_and_time.sh`, indices below 40,000,000), dlrm-small that of
`bench/dlrm_s_criteo_kaggle.sh` on Criteo Kaggle.
"""

from __future__ import annotations

import costgraph as cg

from .family import Family, Preset


def dlrm(
    name: str,
    attention: str,
    dropout: float,
    dtype: str,
    *,
    tables: int = 26,
    bottom: int = 3,
    top: int = 5,
    itself: bool = False,
) -> cg.Graph:
    """Declare DLRM: dense features (B, dense) and N indices into each table (B, N) to a probability (B, 1).

    Table i has V{i} rows of D elements. The bottom MLP has layers of F1, F2, ..., D elements, the top MLP of T1, T2,
    ..., 1. `itself` adds the dot product of each vector with itself. There is no dropout.
    """
    B, N, D, dense = cg.dims("B N D dense")

    with cg.Graph(name, dtype=dtype) as g:
        x = g.input("dense", (B, dense))
        for i in range(1, bottom + 1):
            size = cg.dims(f"F{i}") if i < bottom else D
            x = cg.relu(cg.linear(x, "b i -> b o", o=size, bias=True, name=f"bottom{i}"))
        vectors = [cg.ops.reshape(x, (B, 1, D))]
        for i in range(1, tables + 1):
            ids = g.input(f"indices{i}", (B, N), dtype="int64")
            bag = cg.nn.embedding_bag(ids, g.param(f"table{i}", (cg.dims(f"V{i}"), D)), name=f"bag{i}")
            vectors.append(cg.ops.reshape(bag, (B, 1, D)))
        products = cg.nn.dot_interaction(cg.ops.concat(vectors, 1, name="vectors"), itself=itself)
        x = cg.ops.concat([x, products], 1, name="features")
        for i in range(1, top + 1):
            size = cg.dims(f"T{i}") if i < top else 1
            x = cg.linear(x, "b i -> b o", o=size, bias=True, name=f"top{i}")
            x = cg.relu(x) if i < top else cg.sigmoid(x)
        g.output(x)
        g.loss = "binary_cross_entropy"
    return g


_TERABYTE = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10, 2208, 11938, 155, 4, 976, 14,
    39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip
_KAGGLE = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip


def _preset(rows: tuple[int, ...], bottom: tuple[int, ...], top: tuple[int, ...]) -> Preset:
    """Return sizes for the tables, the bottom MLP, and the top MLP's hidden layers."""
    *hidden, width = bottom
    sizes = {"dense": 13, "N": 1, "D": width}
    for letter, numbers in (("F", hidden), ("T", top), ("V", rows)):
        sizes |= {f"{letter}{i}": n for i, n in enumerate(numbers, 1)}
    return Preset(sizes, {"tables": len(rows), "bottom": len(bottom), "top": len(top) + 1})


FAMILIES = (
    Family(
        dlrm,
        {
            "dlrm-mlperf": _preset(_TERABYTE, (512, 256, 128), (1024, 1024, 512, 256)),
            "dlrm-small": _preset(_KAGGLE, (512, 256, 64, 16), (512, 256)),
        },
        legend={
            "N": "indices per table",
            "D": "embedding size",
            "dense": "dense features",
            "F#": "width of bottom layer #",
            "T#": "width of top layer #",
            "V#": "rows of table #",
        },
    ),
)
