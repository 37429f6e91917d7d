"""Mamba and Mamba-2: selective state-space models with a state of constant size.

Sizes: Gu and Dao 2023 (arXiv 2312.00752), the `config.json` of state-spaces/mamba-130m-hf to mamba-2.8b-hf; Dao and Gu
2024 (arXiv 2405.21060), that of state-spaces/mamba2-130m to mamba2-2.7b and of mistralai/Mamba-Codestral-7B-v0.1. Op
order: `MambaForCausalLM` and `Mamba2ForCausalLM` in transformers.
"""

from __future__ import annotations

from collections.abc import Callable

import costgraph as cg

from .config import Config
from .decoder import decoder
from .family import Family, Preset


def _model(name: str, dtype: str, mixer: Callable[[cg.Tensor], cg.Tensor], *, wide: bool, tied: bool) -> cg.Graph:
    """Declare the common structure: a residual stream, in fp32 if `wide`, and layers."""

    def block(x: cg.Tensor) -> cg.Tensor:
        return x + mixer(cg.rms_norm(cg.ops.cast(x, dtype), name="norm"))

    def stack(x: cg.Tensor) -> cg.Tensor:
        return cg.repeat(cg.dims("L"), block, cg.ops.cast(x, "fp32") if wide else x, name="layers")

    def norm(x: cg.Tensor, *, name: str) -> cg.Tensor:
        return cg.ops.cast(cg.rms_norm(x, name=name), dtype)

    return decoder(name, dtype, stack, norm=norm, tied=tied, assume=())


def mamba(
    name: str, attention: str, dropout: float, dtype: str,
    *, scan: str = "kernel", window: int = 4, bias: bool = False, conv_bias: bool = True, wide: bool = True,
    tied: bool = True,
) -> cg.Graph:  # fmt: skip
    """Declare Mamba: tokens (B, S) to logits (B, S, V); there is no attention and no dropout."""
    B, D, E, N, R = cg.dims("B D E N R")

    def mixer(x: cg.Tensor) -> cg.Tensor:
        x, z = cg.ops.split(cg.linear(x, "b s d -> b s e", e=2 * E, bias=bias, name="in"), (E, E))
        x = cg.silu(cg.nn.causal_conv(x, window, bias=conv_bias))
        dt, b, c = cg.ops.split(cg.linear(x, "b s e -> b s r", r=R + 2 * N, name="x"), (R, N, N))
        dt = cg.linear(dt, "b s r -> b s e", e=E, name="dt")
        shift, log_a, skip = (x.graph.param(n, s) for n, s in (("dt/bias", (E,)), ("log_a", (E, N)), ("skip", (E,))))
        start = cg.ops.initial_state((B, E, N), "fp32", name="state")
        with cg.nn.scan_kernel("selective_scan", scan):
            dt = cg.ops.pointwise("softplus", cg.ops.cast(dt, "fp32") + cg.ops.cast(shift, "fp32"))
            decay = cg.ops.pointwise("exp", cg.einsum(dt, -_exp(log_a), "b s e, e n -> b s e n"))
            fed = cg.einsum(dt * cg.ops.cast(x, "fp32"), cg.ops.cast(b, "fp32"), "b s e, b s n -> b s e n")

            def step(h: cg.Tensor, now: tuple[cg.Tensor, ...]) -> tuple[cg.Tensor, cg.Tensor]:
                decay, fed, c = now
                h = cg.ops.pointwise("fma", decay, h, fed)
                return h, cg.einsum(cg.ops.cast(h, c.dtype), c, "b e n, b n -> b e", name="output")

            y = cg.nn.recurrence(step, start, (decay, fed, c))
            y = cg.ops.cast((y + x * cg.ops.cast(skip, "fp32")) * cg.silu(z), dtype)
        return cg.linear(y, "b s e -> b s d", d=D, bias=bias, name="out")

    return _model(name, dtype, mixer, wide=wide, tied=tied)


def _exp(log_a: cg.Tensor) -> cg.Tensor:
    return cg.ops.pointwise("exp", cg.ops.cast(log_a, "fp32"))


def mamba2(
    name: str, attention: str, dropout: float, dtype: str,
    *, form: str = "recurrent", scan: str = "kernel", window: int = 4, bias: bool = False, conv_bias: bool = True,
    wide: bool = True, tied: bool = True,
) -> cg.Graph:  # fmt: skip
    """Declare Mamba-2 with one decay for each head: recurrent by position, or in chunks of Q with matmuls."""
    D, H, G, K, N = cg.dims("D H G K N")
    forms = {"recurrent": _recurrent, "chunked": _chunked}
    if form not in forms:
        raise cg.GraphError(f"form={form!r}, expected 'recurrent' or 'chunked'")
    E, shared = H * K, 2 * G * N

    def mixer(x: cg.Tensor) -> cg.Tensor:
        y = cg.linear(x, "b s d -> b s e", e=2 * E + shared + H, bias=bias, name="in")
        z, x, dt = cg.ops.split(y, (E, E + shared, H))
        x, b, c = cg.ops.split(cg.silu(cg.nn.causal_conv(x, window, bias=conv_bias)), (E, G * N, G * N))
        x = cg.rearrange(x, "b s (g r k) -> b s g r k", g=G, k=K)
        b, c = (cg.rearrange(t, "b s (g n) -> b s g n", g=G) for t in (b, c))
        dt = cg.rearrange(dt, "b s (g r) -> b s g r", g=G)
        shift, log_a, skip = (x.graph.param(n, (H,)) for n in ("dt/bias", "log_a", "skip"))
        y = forms[form](x, dt, b, c, *(cg.rearrange(t, "(g r) -> g r", g=G) for t in (shift, log_a, skip)), scan=scan)
        y = _gated_norm(cg.rearrange(y, "b s g r k -> b s (g r k)"), z)
        return cg.linear(y, "b s e -> b s d", d=D, bias=bias, name="out")

    return _model(name, dtype, mixer, wide=wide, tied=tied)


def _gated_norm(y: cg.Tensor, z: cg.Tensor) -> cg.Tensor:
    """Multiply by the gate, and normalize each group of channels."""
    G = cg.dims("G")
    weight = y.graph.param("gated_norm/weight", y.shape[-1:])
    with cg.kernel("gated_norm"):
        wide = cg.ops.cast(y, "fp32") * cg.silu(cg.ops.cast(z, "fp32"))
        wide = cg.rearrange(wide, "b s (g e) -> b s g e", g=G)
        power = cg.reduce(cg.ops.pointwise("square", wide), "b s g e -> b s g 1", "mean")
        normalized = cg.rearrange(wide * cg.ops.pointwise("rsqrt", power + 1e-5), "b s g e -> b s (g e)")
        return cg.ops.cast(normalized, z.dtype) * weight


def _time_steps(dt: cg.Tensor, shift: cg.Tensor) -> cg.Tensor:
    return cg.ops.pointwise("clamp", cg.ops.pointwise("softplus", cg.ops.cast(dt, "fp32") + cg.ops.cast(shift, "fp32")))


def _recurrent(
    x: cg.Tensor, dt: cg.Tensor, b: cg.Tensor, c: cg.Tensor,
    shift: cg.Tensor, log_a: cg.Tensor, skip: cg.Tensor, *, scan: str,
) -> cg.Tensor:  # fmt: skip
    """Scan positions with a state of K x N for each head."""
    B, H, G, K, N = cg.dims("B H G K N")
    start = cg.ops.initial_state((B, G, H / G, K, N), "fp32", name="state")
    with cg.nn.scan_kernel("selective_scan", scan):
        dt = _time_steps(dt, shift)
        decay = cg.ops.pointwise("exp", dt * -_exp(log_a))
        fed = cg.einsum(dt, cg.ops.cast(x, "fp32"), "b s g r, b s g r k -> b s g r k")

        def step(h: cg.Tensor, now: tuple[cg.Tensor, ...]) -> tuple[cg.Tensor, cg.Tensor]:
            decay, fed, b, c = now
            new = cg.einsum(fed, cg.ops.cast(b, "fp32"), "b g r k, b g n -> b g r k n")
            h = cg.einsum(decay, h, "b g r, b g r k n -> b g r k n") + new
            return h, cg.einsum(cg.ops.cast(h, c.dtype), c, "b g r k n, b g n -> b g r k", name="output")

        y = cg.nn.recurrence(step, start, (decay, fed, b, c))
        return cg.ops.cast(y + cg.einsum(x, skip, "b s g r k, g r -> b s g r k"), x.dtype)


def _chunked(
    x: cg.Tensor, dt: cg.Tensor, b: cg.Tensor, c: cg.Tensor,
    shift: cg.Tensor, log_a: cg.Tensor, skip: cg.Tensor, *, scan: str,
) -> cg.Tensor:  # fmt: skip
    """Multiply matrices within chunks of Q positions, and scan states over chunks (section 6 of the paper).

    scan="kernel" models five kernels: B @ C is computed once for each group, and states are scanned sequentially.
    scan="ops" models transformers: B @ C is computed for each head, and all states before a chunk in one matmul.
    """
    H, G, Q = cg.dims("H G Q")
    per_head, heads = scan == "ops", "g r" if scan == "ops" else "g"
    # kernels skip masked pairs
    domain, over = (None, ()) if per_head else (cg.Domain(causal=True), ("q", "p"))
    chunks = {t: f"b (m q) {a} -> b m q {a}" for t, a in ((x, "g r k"), (dt, "g r"), (b, "g n"), (c, "g n"))}
    x, dt, b, c = (cg.rearrange(t, pattern, q=Q) for t, pattern in chunks.items())
    if per_head:
        b, c = (cg.ops.expand(cg.ops.cast(t, "fp32"), "b m q g n -> b m q g r n", r=H / G) for t in (b, c))
    with cg.nn.scan_kernel("chunk_cumsum", scan):
        dt = _time_steps(dt, shift)
        log_decay = cg.nn.cumulative_sum(dt * -_exp(log_a), axis=2)
    with cg.nn.scan_kernel("chunk_state", scan):
        fed = cg.einsum(dt, cg.ops.cast(x, "fp32"), "b m p g r, b m p g r k -> b m p g r k")
        decay_to_end = cg.ops.pointwise("exp", log_decay[:, :, Q - 1 :] - log_decay)
        states = cg.einsum(fed, decay_to_end, "b m p g r k, b m p g r -> b m p g r k")
        states = cg.einsum(
            states, cg.ops.cast(b, "fp32"), f"b m p g r k, b m p {heads} n -> b m g r k n", name="states"
        )
    chunk_decay = cg.rearrange(log_decay[:, :, Q - 1 :], "b m 1 g r -> b m g r")
    carried_state = _states_by_matmul(states, chunk_decay) if per_head else _states_by_scan(states, chunk_decay)
    with cg.scope("scores"):
        scores = cg.einsum(c, b, f"b m q {heads} n, b m p {heads} n -> b m {heads} q p")
    with cg.nn.scan_kernel("chunk_scan", scan):
        by_query, by_key = (cg.rearrange(log_decay, f"b m q g r -> b m g r {to}") for to in ("q 1", "1 q"))
        decay = cg.ops.pointwise("exp", by_query - by_key)
        decay = cg.einsum(cg.ops.cast(scores, "fp32"), decay, f"b m {heads} q p, b m g r q p -> b m g r q p")
        pattern = "b m g r q p, b m p g r k -> b m q g r k"
        within = cg.einsum(decay, fed, pattern, domain=domain, over=over, name="within")
        across = cg.einsum(
            cg.ops.cast(c, "fp32"), carried_state, f"b m q {heads} n, b m g r k n -> b m q g r k", name="across"
        )
        y = within + cg.einsum(across, cg.ops.pointwise("exp", log_decay), "b m q g r k, b m q g r -> b m q g r k")
        y = cg.ops.cast(y + cg.einsum(x, skip, "b m q g r k, g r -> b m q g r k"), x.dtype)
    return cg.rearrange(y, "b m q g r k -> b (m q) g r k")


def _states_by_scan(states: cg.Tensor, chunk_decay: cg.Tensor) -> cg.Tensor:
    """Return the state before each chunk by a sequential scan."""
    start = cg.ops.initial_state((states.shape[0], *states.shape[2:]), "fp32", name="state")

    def step(h: cg.Tensor, inputs: tuple[cg.Tensor, cg.Tensor]) -> tuple[cg.Tensor, cg.Tensor]:
        state, decay = inputs
        return cg.einsum(cg.ops.pointwise("exp", decay), h, "b g r, b g r k n -> b g r k n") + state, h

    with cg.kernel("state_passing"):
        return cg.nn.recurrence(step, start, (states, chunk_decay))


def _states_by_matmul(states: cg.Tensor, chunk_decay: cg.Tensor) -> cg.Tensor:
    """Return the state before each chunk by one matmul of all states, including the initial one, with their decays."""
    B, M = states.shape[:2]
    first = cg.ops.initial_state((B, 1, *states.shape[2:]), "fp32", name="state")
    states = cg.ops.concat([first, states], 1)
    log_decay = cg.nn.cumulative_sum(
        cg.ops.concat([cg.ops.initial_state((B, 1, *chunk_decay.shape[2:]), "fp32"), chunk_decay], 1), axis=1
    )
    by_query, by_key = (cg.rearrange(log_decay, f"b m g r -> b g r {to}") for to in ("m 1", "1 m"))
    decay = cg.ops.pointwise("exp", by_query - by_key)
    carried = cg.einsum(decay, states, "b g r m z, b z g r k n -> b m g r k n", name="passed")
    return carried[:, :M]


def read_mamba(c: Config) -> Preset:
    """Read a transformers `MambaConfig`."""
    D = c.size("hidden_size")
    sizes = {"D": D, "E": _inner(c, D), "N": c.size("state_size")}
    sizes |= {"R": c.size_or_auto("time_step_rank", -(-D // 16)), "L": c.size("num_hidden_layers")}
    c.ignore("use_mambapy", "use_associative_scan", "fused_add_norm")
    # duplicates in files of the first release
    c.expect("d_model", D)
    c.expect("n_layer", sizes["L"])
    c.expect("rms_norm", True)
    c.expect("ssm_cfg", {})
    c.ignore("pad_vocab_size_multiple")
    return Preset({**sizes, "V": c.size("vocab_size")}, _structure(c))


def read_mamba2(c: Config) -> Preset:
    """Read a transformers `Mamba2Config`."""
    D, H, K = c.size("hidden_size"), c.size("num_heads"), c.size("head_dim")
    if _inner(c, D) != H * K:
        raise cg.FormatError(f"{c.place}: num_heads*head_dim is {H * K}, expected expand*hidden_size = {_inner(c, D)}")
    sizes = {"D": D, "H": H, "K": K, "G": c.size("n_groups"), "N": c.size("state_size")}
    sizes |= {"Q": c.size("chunk_size"), "L": c.size("num_hidden_layers"), "V": c.size("vocab_size")}
    c.ignore("time_step_rank", "time_step_limit")
    c.expect("rms_norm", True)
    c.ignore("norm_before_gate")  # transformers gates first, whatever it says
    return Preset(sizes, _structure(c))


def _inner(c: Config, D: int) -> int:
    """Return the inner width; if a file states it, it must equal expand * hidden_size."""
    inner = c.size("expand") * D
    c.expect("intermediate_size", inner)
    c.expect("d_inner", inner)
    return inner


def _structure(c: Config) -> dict[str, object]:
    c.expect("hidden_act", "silu", "swish")
    c.ignore("time_step_min", "time_step_max", "time_step_floor", "time_step_init_scheme", "time_step_scale")
    c.ignore("rescale_prenorm_residual")
    return {
        "window": c.size("conv_kernel"),
        "bias": c.flag("use_bias"),
        "conv_bias": c.flag("use_conv_bias"),
        "wide": c.flag("residual_in_fp32"),
        "tied": c.flag("tie_word_embeddings"),
    }


def _mamba(D: int, L: int) -> Preset:
    return Preset({"D": D, "E": 2 * D, "N": 16, "R": D // 16, "L": L, "V": 50280})


def _mamba2(D: int, L: int) -> Preset:
    return Preset({"D": D, "H": D // 32, "G": 1, "K": 64, "N": 128, "Q": 256, "L": L, "V": 50288})


FAMILIES = (
    Family(
        mamba,
        {
            "mamba-130m": _mamba(768, 24),
            "mamba-370m": _mamba(1024, 48),
            "mamba-790m": _mamba(1536, 48),
            "mamba-1.4b": _mamba(2048, 48),
            "mamba-2.8b": _mamba(2560, 64),
        },
        architectures={"MambaForCausalLM": "mamba"},
        read=read_mamba,
        legend={"E": "inner width", "N": "state size", "R": "rank of the time step"},
    ),
    Family(
        mamba2,
        {
            "mamba2-130m": _mamba2(768, 24),
            "mamba2-370m": _mamba2(1024, 48),
            "mamba2-780m": _mamba2(1536, 48),
            "mamba2-1.3b": _mamba2(2048, 48),
            "mamba2-2.7b": _mamba2(2560, 64),
            "mamba-codestral-7b": Preset(
                {"D": 4096, "H": 128, "G": 8, "K": 64, "N": 128, "Q": 256, "L": 64, "V": 32768}, {"tied": False}
            ),
        },
        architectures={"Mamba2ForCausalLM": "mamba2"},
        read=read_mamba2,
        legend={"G": "groups", "N": "state size"},
    ),
)
