"""xLSTM: mLSTM with a matrix state for each head, and sLSTM with recurrent gates.

Sizes: Beck et al. 2025 (arXiv 2503.13427) and the `config.json` of NX-AI/xLSTM-7b; Beck et al. 2024 (arXiv 2405.04517),
appendix on language modelling, xLSTM[1:0] with mLSTM only and xLSTM[7:1] with some sLSTM blocks. Op order:
`xLSTMForCausalLM` in transformers, and `xLSTMLMModel` of NX-AI/xlstm.
"""

from __future__ import annotations

from functools import partial

import sympy

import costgraph as cg

from .blocks import gated_mlp, residual
from .config import Config
from .decoder import decoder
from .family import Family, Preset

_Gates = tuple[cg.Tensor, cg.Tensor, cg.Tensor, cg.Tensor, cg.Tensor]


def xlstm_large(
    name: str, attention: str, dropout: float, dtype: str, *, form: str = "recurrent", scan: str = "kernel"
) -> cg.Graph:
    """Declare xLSTM 7B: tokens (B, S) to logits (B, S, V); there is no attention and no dropout."""
    D, H, K, U, L = cg.dims("D H K U L")
    forms = {"recurrent": _recurrent, "chunked": _chunked}
    if form not in forms:
        raise cg.GraphError(f"form={form!r}, expected 'recurrent' or 'chunked'")

    def mixer(x: cg.Tensor) -> cg.Tensor:
        q, k, v, o = (
            cg.linear(x, "b s d -> b s h k", h=H, k=size, name=f"mlstm/{n}")
            for n, size in (("q", K), ("k", K), ("v", U), ("o", U))
        )
        i, f = (
            cg.ops.pointwise("softcap", cg.linear(x, "b s d -> b s h", h=H, bias=True, name=f"mlstm/{n}")) for n in "if"
        )
        y = cg.nn.head_norm(forms[form](q, k, v, i, f, scan), name="mlstm/norm")
        y = cg.sigmoid(cg.rearrange(o, "b s h k -> b s (h k)")) * y
        return cg.linear(y, "b s e -> b s d", d=D, name="mlstm/out")

    def block(x: cg.Tensor) -> cg.Tensor:
        return residual(x + mixer(cg.rms_norm(x, name="norm")), gated_mlp("silu"), "mlp")

    def stack(x: cg.Tensor) -> cg.Tensor:
        return cg.repeat(L, block, x, name="layers")

    def end(x: cg.Tensor) -> cg.Tensor:
        return cg.ops.pointwise("softcap", x)

    return decoder(name, dtype, stack, end=end, assume=())


def _log_sigmoid(x: cg.Tensor) -> cg.Tensor:
    return -cg.ops.pointwise("softplus", -x)


def _states(q: cg.Tensor, v: cg.Tensor) -> tuple[cg.Tensor, cg.Tensor, cg.Tensor]:
    """Return a head's initial state: a matrix, a sum of keys, and the running maximum of exponents."""
    (B, _, H, K), U = q.shape, v.shape[-1]
    shapes = {"matrix": (B, H, K, U), "norm": (B, H, K), "largest": (B, H)}
    states = [cg.ops.initial_state(shape, "fp32", name=f"mlstm/{n}") for n, shape in shapes.items()]
    return states[0], states[1], states[2]


def _recurrent(q: cg.Tensor, k: cg.Tensor, v: cg.Tensor, i: cg.Tensor, f: cg.Tensor, scan: str) -> cg.Tensor:
    """Scan positions with a matrix state, stabilized by the largest exponent (eq. 19 to 27)."""
    # transformers computes the outer product as a matmul
    outer = "b h k o, b h o v -> b h k v" if scan == "ops" else "b h k 1, b h 1 v -> b h k v"

    def step(state: tuple[cg.Tensor, ...], now: _Gates) -> tuple[tuple[cg.Tensor, ...], cg.Tensor]:
        (matrix, norm, largest), (q, k, v, i, f) = state, now
        forget_exponent = _log_sigmoid(cg.ops.cast(f, "fp32")) + largest
        largest = cg.ops.pointwise("maximum", forget_exponent, cg.ops.cast(i, "fp32"))
        forget, input_gate = cg.ops.pointwise("exp", forget_exponent - largest), cg.ops.pointwise("exp", i - largest)
        column, row = cg.rearrange(k, "b h k -> b h k 1"), cg.rearrange(v, "b h v -> b h 1 v")
        new = cg.einsum(input_gate, cg.einsum(column, row, outer, name="outer"), "b h, b h k v -> b h k v")
        matrix = cg.einsum(forget, matrix, "b h, b h k v -> b h k v") + new
        norm = cg.einsum(forget, norm, "b h, b h k -> b h k") + cg.einsum(input_gate, k, "b h, b h k -> b h k")
        q = q * 1.0  # one over the root of the size
        y = cg.einsum(q, cg.ops.cast(matrix, q.dtype), "b h k, b h k v -> b h v", name="output")
        projection = cg.einsum(q, cg.ops.cast(norm, q.dtype), "b h k, b h k -> b h", name="normalise")
        normalizer = (
            cg.ops.pointwise("maximum", cg.ops.pointwise("abs", projection), cg.ops.pointwise("exp", -largest)) + 1e-6
        )
        return (matrix, norm, largest), cg.ops.cast(y / cg.rearrange(normalizer, "b h -> b h 1"), q.dtype)

    start = _states(q, v)
    with cg.nn.scan_kernel("mlstm_recurrent", scan):
        return cg.nn.recurrence(step, start, (q, k, v, i, f))


def _chunked(q: cg.Tensor, k: cg.Tensor, v: cg.Tensor, i: cg.Tensor, f: cg.Tensor, scan: str) -> cg.Tensor:
    """Multiply matrices within chunks of Q positions, and scan states over chunks."""
    Q = cg.dims("Q H")[0]
    q, k, v = (cg.rearrange(t, "b (m q) h k -> b m h q k", q=Q) for t in (q, k, v))
    i, f = (cg.rearrange(cg.ops.cast(t, "fp32"), "b (m q) h -> b m h q", q=Q) for t in (i, f))
    with cg.nn.scan_kernel("chunk_gates", scan):
        log_decay = cg.nn.cumulative_sum(_log_sigmoid(f))
        chunk_decay = log_decay[:, :, :, Q - 1 :]
        exponents = chunk_decay - log_decay + i
        chunk_max = cg.reduce(exponents, "b m h q -> b m h 1", "max")

    def step(state: tuple[cg.Tensor, ...], now: _Gates) -> tuple[tuple[cg.Tensor, ...], tuple[cg.Tensor, ...]]:
        (matrix, norm, largest), (k, v, chunk_decay, exponents, chunk_max) = state, now
        forget_exponent = largest + cg.rearrange(chunk_decay, "b h 1 -> b h")
        new_largest = cg.ops.pointwise("maximum", forget_exponent, cg.rearrange(chunk_max, "b h 1 -> b h"))
        gates = cg.ops.pointwise("exp", exponents - cg.rearrange(new_largest, "b h -> b h 1"))
        k, decay = (
            cg.einsum(cg.ops.cast(k, "fp32"), gates, "b h q k, b h q -> b h q k"),
            cg.ops.pointwise("exp", forget_exponent - new_largest),
        )
        new = cg.einsum(k, cg.ops.cast(v, "fp32"), "b h q k, b h q v -> b h k v", name="matrix")
        carried = cg.einsum(decay, matrix, "b h, b h k v -> b h k v") + new
        sums = cg.einsum(decay, norm, "b h, b h k -> b h k") + cg.reduce(k, "b h q k -> b h k", "sum")
        return (carried, sums, new_largest), state

    start = _states(cg.rearrange(q, "b m h q k -> b m q h k")[:, 0], v)
    with cg.nn.scan_kernel("mlstm_states", scan):
        states = cg.nn.recurrence(step, start, (k, v, chunk_decay, exponents, chunk_max))
    return _intra_chunk(q, k, v, i, log_decay, states, scan)


def _intra_chunk(
    q: cg.Tensor,
    k: cg.Tensor,
    v: cg.Tensor,
    i: cg.Tensor,
    log_decay: cg.Tensor,
    states: tuple[cg.Tensor, ...],
    scan: str,
) -> cg.Tensor:
    """Read the state before each chunk, and attend causally within the chunk."""
    # a kernel skips masked pairs
    domain, over = (None, ()) if scan == "ops" else (cg.Domain(causal=True), ("q", "p"))
    matrix, norm, largest = states
    with cg.nn.scan_kernel("mlstm_within", scan):
        across = log_decay + cg.rearrange(largest, "b m h -> b m h 1")
        exponents = cg.rearrange(log_decay, "b m h q -> b m h q 1") + cg.rearrange(
            i - log_decay, "b m h q -> b m h 1 q"
        )
        row_max = cg.ops.pointwise("maximum", across, cg.reduce(exponents, "b m h q p -> b m h q", "max"))
        scores = cg.einsum(q, k, "b m h q k, b m h p k -> b m h q p", name="scores")
        weights = scores * cg.ops.pointwise("exp", exponents - cg.rearrange(row_max, "b m h q -> b m h q 1"))
        queries = cg.einsum(q, cg.ops.pointwise("exp", across - row_max), "b m h q k, b m h q -> b m h q k")
        y = cg.einsum(queries, matrix, "b m h q k, b m h k v -> b m h q v", name="across")
        pattern = "b m h q p, b m h p v -> b m h q v"
        y = y + cg.einsum(weights, cg.ops.cast(v, "fp32"), pattern, domain=domain, over=over, name="within")
        projection = cg.einsum(queries, norm, "b m h q k, b m h k -> b m h q", name="normalise")
        projection = cg.ops.pointwise("abs", projection + cg.reduce(weights, "b m h q p -> b m h q", "sum"))
        normalizer = cg.ops.pointwise("maximum", projection, cg.ops.pointwise("exp", -row_max)) + 1e-6
        y = cg.ops.cast(y / cg.rearrange(normalizer, "b m h q -> b m h q 1"), q.dtype)
    return cg.rearrange(y, "b m h q v -> b (m q) h v")


def xlstm(
    name: str, attention: str, dropout: float, dtype: str,
    *, slstm: tuple[int, ...] = (), window: int = 4, block: int = 4, scan: str = "kernel", tied: bool = False,
) -> cg.Graph:  # fmt: skip
    """Declare xLSTM of 2024: L blocks, with sLSTM at the positions `slstm` and mLSTM elsewhere, including the last."""
    positions, (L,) = _check_positions(slstm), cg.dims("L,")

    def matrix(x: cg.Tensor) -> cg.Tensor:
        return _mlstm_block(x, window, block, scan, dropout)

    def stack(x: cg.Tensor) -> cg.Tensor:
        x, next_block = cg.dropout(x, dropout), 0
        for position in positions:
            x = cg.repeat(position - next_block, matrix, x, name=f"before_{position}") if position > next_block else x
            with cg.scope(f"slstm_{position}"):
                x = _slstm_block(x, window, scan, dropout)
            next_block = position + 1
        return cg.repeat(L - next_block, matrix, x, name="layers")

    norm, min_layers = partial(cg.layer_norm, bias=False), (positions[-1] if positions else 0) + 2
    return decoder(name, dtype, stack, norm=norm, tied=tied, assume=(f"L >= {min_layers}",))


def _check_positions(positions: tuple[int, ...]) -> tuple[int, ...]:
    fits = isinstance(positions, tuple) and all(
        isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in positions
    )
    if not fits or list(positions) != sorted(set(positions)):
        raise cg.GraphError(f"slstm={positions!r}, expected a tuple of block positions in ascending order from 0")
    return positions


def _headwise(x: cg.Tensor, heads: sympy.Expr, name: str) -> cg.Tensor:
    """Apply a block-diagonal linear layer: (b, s, d) to (b, s, heads, d/heads)."""
    x = cg.rearrange(x, "b s (h d) -> b s h d", h=heads)
    weight = x.graph.param(f"{name}/weight", (heads, x.shape[-1], x.shape[-1]))
    with cg.scope(name):
        return cg.einsum(x, weight, "b s h d, h d e -> b s h e", name="matmul")


def _mlstm_block(x: cg.Tensor, window: int, block: int, scan: str, p: float) -> cg.Tensor:
    """Apply mLSTM at twice the width, next to a gate (figure 11 of the paper)."""
    D, H = cg.dims("D H")
    E = 2 * D
    y = cg.linear(cg.layer_norm(x, bias=False, name="norm"), "b s d -> b s e", e=2 * E, name="up")
    y, z = cg.ops.split(y, (E, E))
    convolved = cg.silu(cg.nn.causal_conv(y, window))
    qkv = [_headwise(t, E / block, n) for t, n in ((convolved, "q"), (convolved, "k"), (y, "v"))]
    qkv = [cg.rearrange(t, "b s n e -> b s (n e)") for t in qkv]
    gates_input = cg.ops.concat(qkv, -1, name="gates_input")
    i, f = (cg.linear(gates_input, "b s e -> b s h", h=H, bias=True, name=n) for n in ("input_gate", "forget_gate"))
    q, k, v = (cg.rearrange(t, "b s (h k) -> b s h k", h=H) for t in qkv)
    y = cg.nn.head_norm(_recurrent(q, k, v, i, f, scan), name="head_norm")
    y = (y + x.graph.param("skip", (E,)) * convolved) * cg.silu(z)
    return x + cg.dropout(cg.linear(y, "b s e -> b s d", d=D, name="down"), p)


def _slstm_block(x: cg.Tensor, window: int, scan: str, p: float) -> cg.Tensor:
    """Apply sLSTM, followed by a gated feed-forward layer (figure 10 of the paper)."""
    D, H, F = cg.dims("D H F")
    y = cg.layer_norm(x, bias=False, name="norm")
    convolved = cg.silu(cg.nn.causal_conv(y, window))
    gates = [_headwise(t, H, f"gates/{n}") for t, n in ((convolved, "i"), (convolved, "f"), (y, "z"), (y, "o"))]
    weight, bias = (
        x.graph.param(f"state/{n}", shape) for n, shape in (("weight", (H, D / H, 4, D / H)), ("bias", (4, H, D / H)))
    )
    y = cg.nn.head_norm(_slstm(gates, weight, bias, scan), name="head_norm")
    x = x + cg.dropout(y, p)
    y = cg.linear(cg.layer_norm(x, bias=False, name="mlp/norm"), "b s d -> b s f", f=2 * F, name="mlp/up")
    gate, up = cg.ops.split(y, (F, F))
    return x + cg.dropout(cg.linear(cg.gelu(gate) * up, "b s f -> b s d", d=D, name="mlp/down"), p)


def _slstm(gates: list[cg.Tensor], weight: cg.Tensor, bias: cg.Tensor, scan: str) -> cg.Tensor:
    """Scan positions with cell, normalizer, largest exponent and output (eq. 8 to 18)."""
    (B, _, H, K), dtype = gates[0].shape, gates[0].dtype
    start = tuple(
        cg.ops.initial_state((B, H, K), dtype, name=f"slstm/{n}") for n in ("output", "cell", "norm", "largest")
    )

    def step(state: tuple[cg.Tensor, ...], now: tuple[cg.Tensor, ...]) -> tuple[tuple[cg.Tensor, ...], cg.Tensor]:
        y, cell, norm, largest = state
        recurrent = cg.einsum(y, weight, "b h k, h k n e -> b n h e", name="state")
        recurrent = recurrent + bias
        i, f, z, o = (t + cg.rearrange(gate_part, "b 1 h e -> b h e") for t, gate_part in zip(
            now, cg.ops.split(recurrent, (1, 1, 1, 1), 1), strict=True))  # fmt: skip
        forget_exponent = _log_sigmoid(f) + largest
        largest = cg.ops.pointwise("maximum", forget_exponent, i)
        forget, input_gate = cg.ops.pointwise("exp", forget_exponent - largest), cg.ops.pointwise("exp", i - largest)
        cell = cg.ops.pointwise("fma", forget, cell, input_gate * cg.tanh(z))
        norm = cg.ops.pointwise("fma", forget, norm, input_gate)
        y = cg.sigmoid(o) * (cell / norm)
        return (y, cell, norm, largest), y

    with cg.nn.scan_kernel("slstm", scan):
        return cg.nn.recurrence(step, start, tuple(gates))


def read(c: Config) -> Preset:
    """Read a transformers `xLSTMConfig`."""
    D, L, H = c.size("hidden_size"), c.size("num_hidden_layers"), c.size("num_heads")
    qk, v = (int(D * c.number(f"{name}_dim_factor", above=0)) for name in ("qk", "v"))
    if qk % H or v % H:
        raise cg.FormatError(
            f"{c.place}: key size {qk} and value size {v} with num_heads {H}, expected multiples of num_heads"
        )
    inner, multiple = D * c.number("ffn_proj_factor", above=0), c.size("ffn_round_up_to_multiple_of")
    sizes = {"D": D, "H": H, "K": qk // H, "U": v // H, "F": int((inner + multiple - 1) // multiple) * multiple}
    sizes |= {"L": L, "V": c.size("vocab_size")}
    c.expect("embedding_dim", D)
    c.expect("num_blocks", L)
    for field, value in (("use_bias", False), ("add_out_norm", True), ("tie_word_embeddings", False)):
        c.expect(field, value)
    c.expect("weight_mode", "single")
    c.expect("inference_state_dtype", "float32")
    c.ignore("gate_soft_cap", "output_logit_soft_cap", "norm_reduction_force_float32", "eps", "return_last_states")
    c.ignore("chunkwise_kernel", "sequence_kernel", "step_kernel", "mode", "autocast_kernel_dtype")
    c.ignore("max_inference_chunksize")
    return Preset({**sizes, "Q": c.size("chunk_size")})


def _small(D: int, L: int, H: int, *slstm: int) -> Preset:
    inner = -(-13 * D // 640) * 64  # 1.3 times the width, in steps of 64
    return Preset({"D": D, "H": H, "F": inner, "L": L, "V": 50304}, {"slstm": slstm})


FAMILIES = (
    Family(
        xlstm_large,
        {"xlstm-7b": Preset({"D": 4096, "H": 8, "K": 256, "U": 512, "F": 10944, "L": 32, "V": 50304, "Q": 64})},
        architectures={"xLSTMForCausalLM": "xlstm"},
        read=read,
        legend={"K": "head size of keys", "U": "head size of values"},
    ),
    Family(
        xlstm,
        {
            "xlstm-125m": _small(768, 24, 4),
            "xlstm-350m": _small(1024, 48, 4),
            "xlstm-760m": _small(1536, 48, 4),
            "xlstm-1.3b": _small(2048, 48, 4),
            "xlstm-125m-7-1": _small(768, 24, 4, 3, 20),
            "xlstm-350m-7-1": _small(1024, 48, 4, 3, 5, 7, 40, 42, 44),
            "xlstm-760m-7-1": _small(1536, 48, 4, 3, 5, 7, 40, 42, 44),
            "xlstm-1.3b-7-1": _small(2048, 48, 4, 3, 5, 7, 40, 42, 44),
        },
    ),
)
