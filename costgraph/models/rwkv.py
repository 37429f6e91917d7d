"""RWKV-7 "Goose": a matrix state for each head, updated at each position by decay, a delta rule and a new term.

Sizes: Peng et al. 2025 (arXiv 2503.14456). Op order: `RWKV_Tmix_x070` and `RWKV_CMix_x070` of BlinkDL/RWKV-LM, and its
kernel `wkv7`.
"""

from __future__ import annotations

import costgraph as cg

from .decoder import decoder
from .family import Family, Preset


def rwkv7(name: str, attention: str, dropout: float, dtype: str, *, scan: str = "kernel") -> cg.Graph:
    """Declare RWKV-7: tokens (B, S) to logits (B, S, V); there is no attention and no dropout."""
    L, F = cg.dims("L F")

    def layer(x: cg.Tensor, values: cg.Tensor | None) -> tuple[cg.Tensor, cg.Tensor]:
        y, v = _time_mix(cg.layer_norm(x, name="time/norm"), values, scan)
        x = x + y
        return x + _channel_mix(cg.layer_norm(x, name="channel/norm"), F), v

    def stack(x: cg.Tensor) -> cg.Tensor:
        x = cg.layer_norm(x, name="tokens/norm")
        # later layers mix the values of the first layer into their own
        with cg.scope("first"):
            x, values = layer(x, None)
        return cg.repeat(L - 1, lambda x: layer(x, values)[0], x, name="layers")

    return decoder(name, dtype, stack, norm=cg.layer_norm, assume=("L >= 2",))


def _token_shift_mix(x: cg.Tensor, names: str, scope: str) -> list[cg.Tensor]:
    """Interpolate each position with the previous one, with weights for each channel and use, in one kernel."""
    weights = [x.graph.param(f"{scope}/mix_{n}", x.shape[-1:]) for n in names]
    previous = cg.nn.token_shift(x, name=f"{scope}/shift")
    with cg.kernel(f"{scope}_mix"):
        change = previous - x
        return [cg.ops.pointwise("fma", change, share, x) for share in weights]


def _low_rank(x: cg.Tensor, rank: str, name: str, inner: str | None, *, bias: bool = True) -> cg.Tensor:
    """Apply a low-rank layer with an optional activation between its two matrices."""
    y = cg.linear(x, "b s d -> b s r", r=cg.dims(rank), name=f"{name}/down")
    y = y if inner is None else cg.ops.pointwise(inner, y, name=f"{name}/{inner}")
    return cg.linear(y, "b s r -> b s d", d=x.shape[-1], bias=bias, name=f"{name}/up")


def _time_mix(x: cg.Tensor, values: cg.Tensor | None, scan: str) -> tuple[cg.Tensor, cg.Tensor]:
    B, D, K = cg.dims("B D K")
    vector = {n: x.graph.param(f"time/{n}", (D,)) for n in ("k_k", "k_a", "r_k")}
    xr, xw, xk, xv, xa, xg = _token_shift_mix(x, "rwkvag", "time")
    r, k, v = (cg.linear(t, "b s d -> b s e", e=D, name=f"time/{n}") for t, n in ((xr, "r"), (xk, "k"), (xv, "v")))
    w = _low_rank(xw, "R_w", "time/decay", "tanh")
    if values is None:
        values = v
    else:
        share = cg.sigmoid(_low_rank(xv, "R_v", "time/value", None))
        v = cg.ops.pointwise("lerp", v, values, share)
    a = cg.sigmoid(_low_rank(xa, "R_a", "time/rate", None))
    gate = _low_rank(xg, "R_g", "time/gate", "sigmoid", bias=False)
    with cg.kernel("keys"):
        direction = cg.rearrange(k * vector["k_k"], "b s (h k) -> b s h k", k=K)
        power = cg.reduce(cg.ops.pointwise("square", direction), "b s h k -> b s h 1", "sum")
        direction = direction * cg.ops.pointwise("rsqrt", power)
        k = k * (1.0 + (a - 1.0) * vector["k_a"])
        removal = direction * cg.rearrange(a, "b s (h k) -> b s h k", k=K)
    r, w, k, v = (cg.rearrange(t, "b s (h k) -> b s h k", k=K) for t in (r, w, k, v))
    y = _wkv(r, w, k, v, -direction, removal, cg.ops.initial_state((B, D / K, K, K), "fp32", name="time/state"), scan)
    y = cg.nn.head_norm(y, bias=True, name="time/out_norm")
    with cg.kernel("bonus"):
        bonus_weight = cg.rearrange(vector["r_k"], "(h k) -> h k", k=K)
        bonus = cg.reduce(r * k * bonus_weight, "b s h k -> b s h 1", "sum")
        y = (y + cg.rearrange(bonus * v, "b s h k -> b s (h k)")) * gate
    return cg.linear(y, "b s e -> b s d", d=D, name="time/out"), values


def _wkv(
    r: cg.Tensor, w: cg.Tensor, k: cg.Tensor, v: cg.Tensor, a: cg.Tensor, b: cg.Tensor, start: cg.Tensor, scan: str
) -> cg.Tensor:
    """Scan S = S*w + (S@a) b.T + v k.T over positions, and read S@r (eq. 17)."""

    def step(s: cg.Tensor, now: tuple[cg.Tensor, ...]) -> tuple[cg.Tensor, cg.Tensor]:
        r, w, k, v, a, b = (cg.ops.cast(t, "fp32") for t in now)
        removed = cg.einsum(s, a, "b h v k, b h k -> b h v", name="removed")
        s = cg.einsum(s, w, "b h v k, b h k -> b h v k") + cg.einsum(removed, b, "b h v, b h k -> b h v k")
        s = s + cg.einsum(v, k, "b h v, b h k -> b h v k")
        return s, cg.ops.cast(cg.einsum(s, r, "b h v k, b h k -> b h v", name="output"), now[0].dtype)

    with cg.nn.scan_kernel("wkv", scan):
        decay = cg.ops.pointwise(
            "exp", -cg.ops.pointwise("exp", -cg.ops.pointwise("softplus", -cg.ops.cast(w, "fp32")) - 0.5)
        )
        return cg.nn.recurrence(step, start, (r, decay, k, v, a, b))


def _channel_mix(x: cg.Tensor, inner: object) -> cg.Tensor:
    (x,) = _token_shift_mix(x, "k", "channel")
    return cg.nn.mlp(x, inner, activation=lambda t: cg.ops.pointwise("relu2", t), name="channel")


def _sizes(D: int, L: int, decay: int, rate: int, value: int, gate: int) -> Preset:
    ranks = {"R_w": decay, "R_a": rate, "R_v": value, "R_g": gate}
    return Preset({"D": D, "K": 64, "F": 4 * D, "L": L, "V": 65536, **ranks})


FAMILIES = (
    Family(
        rwkv7,
        {
            "rwkv-7-0.1b": _sizes(768, 12, 64, 64, 32, 128),
            "rwkv-7-0.4b": _sizes(1024, 24, 64, 64, 32, 128),
            "rwkv-7-1.5b": _sizes(2048, 24, 96, 96, 64, 256),
            "rwkv-7-2.9b": _sizes(2560, 32, 96, 96, 64, 320),
        },
        legend={
            "R_w": "rank of the decay",
            "R_a": "rank of the learning rate",
            "R_v": "rank of the value mix",
            "R_g": "rank of the gate",
        },
    ),
)
