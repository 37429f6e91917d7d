"""Functions of a module as single kernels, or decomposed with tensor lifetimes as in transformers' eager code.

Source: transformers 5.23, `activations.NewGELUActivation`, `LlamaRMSNorm`, `LlamaRotaryEmbedding`,
`apply_rotary_pos_emb`, `repeat_kv`, `eager_attention_forward`, `create_causal_mask`, `GPT2Block` and
`LlamaDecoderLayer`.
"""

from __future__ import annotations

from math import pi, sqrt

import sympy

import costgraph as cg

__all__ = ["KERNELS", "EagerOps", "Kernels"]

#: Additive mask of a hidden score; the value affects no cost, and every floating format can represent it.
_MASKED_SCORE = -1e4


class Kernels:
    """Functions as kernels, without variables: a tensor dies after its last reader."""

    # -- variable lifetimes --------------------------------------------------------------------------------------------

    def keep_for_model(self, x: cg.Tensor) -> cg.Tensor:
        """Return a tensor that lives until the final norm."""
        return x

    def keep(self, x: cg.Tensor, *others: cg.Tensor) -> cg.Tensor:
        """Return a tensor, and keep others alive until it is computed."""
        return x

    def add(self, x: cg.Tensor, output: cg.Tensor, branch_input: cg.Tensor) -> cg.Tensor:
        """Add a residual branch's output to the residual stream; `branch_input` is the input of the branch."""
        return x + output

    def end_layer(self, y: cg.Tensor, x: cg.Tensor) -> cg.Tensor:
        """Return the output of a layer with input x."""
        return y

    def end_model(self, y: cg.Tensor, x: cg.Tensor) -> cg.Tensor:
        """Return the output of the final norm with input x."""
        return y

    # -- functions -----------------------------------------------------------------------------------------------------

    def pointwise(self, function: str, x: cg.Tensor) -> cg.Tensor:
        """Apply an elementwise function."""
        return cg.ops.pointwise(function, x)

    def rms_norm(self, x: cg.Tensor, *, name: str) -> cg.Tensor:
        """Divide by the root mean square, and scale."""
        return cg.rms_norm(x, name=name)

    def create_mask(self, positions: cg.Tensor, kernel: str) -> None:
        """Create the causal mask, once for all layers."""

    def rotary_tables(self, positions: cg.Tensor, size: sympy.Expr) -> tuple[cg.Tensor, cg.Tensor]:
        """Return rotary cosines and sines for a head size."""
        return cg.nn.rotary_tables(positions, size)

    def attention(self, q: cg.Tensor, k: cg.Tensor, v: cg.Tensor, kernel: str, p: float) -> cg.Tensor:
        """Apply causal attention to (b, h, s, k), and merge heads to (b, s, h*k)."""
        k, v = (cg.ops.cache(t, "b h t k", along="t", name=f"attention/{c}_cache") for c, t in (("k", k), ("v", v)))
        y = cg.attention(q, k, v, causal=True, kernel=kernel, p=p, name="attention")
        return cg.rearrange(y, "b h s k -> b s (h k)", name="attention/merge")

    def self_attention(
        self, x: cg.Tensor, heads: sympy.Expr, size: sympy.Expr, *, groups: sympy.Expr,
        rope: tuple[cg.Tensor, cg.Tensor], kernel: str, bias: bool, p: float,
    ) -> cg.Tensor:  # fmt: skip
        """Apply causal self-attention with rotary positions and its linear layers."""
        return cg.nn.self_attention(
            x, heads, size, groups=groups, rope=rope, kernel=kernel, bias=bias, out_bias=bias, p=p
        )


#: Default implementation of functions.
KERNELS = Kernels()


class EagerOps(Kernels):
    """Functions as eager code runs them: one op for each call, with the lifetimes of Python variables.

    The softmax has the format of the scores by default. `renamed` says whether the output of a residual branch has its
    own variable, which extends the lifetimes of the branch's input and output.
    """

    def __init__(self, dtype: str, softmax: str = "", *, renamed: bool) -> None:
        self._dtype, self._softmax, self._renamed = dtype, softmax, renamed
        self._mask: cg.Tensor | None = None
        self._model_variables: list[cg.Tensor] = []
        self._layer_variables: list[cg.Tensor] = []

    # -- variable lifetimes --------------------------------------------------------------------------------------------

    def keep_for_model(self, x: cg.Tensor) -> cg.Tensor:
        """Return a tensor that lives until the final norm has returned."""
        self._model_variables.append(x)
        return x

    def keep(self, x: cg.Tensor, *others: cg.Tensor) -> cg.Tensor:
        """Return a tensor, and keep others alive until it is computed."""
        return cg.ops.keep_alive(x, *others)

    def add(self, x: cg.Tensor, output: cg.Tensor, branch_input: cg.Tensor) -> cg.Tensor:
        """Add, with the branch's input alive until the branch returns or, with its own variable, for longer."""
        if not self._renamed:
            return x + cg.ops.keep_alive(output, branch_input)
        self._layer_variables.append(output)
        return cg.ops.keep_alive(x + output, branch_input)

    def end_layer(self, y: cg.Tensor, x: cg.Tensor) -> cg.Tensor:
        """Keep a layer's input, and its attention outputs, alive until it returns."""
        named, self._layer_variables = self._layer_variables, []
        return cg.ops.keep_alive(y, *named, x)

    def end_model(self, y: cg.Tensor, x: cg.Tensor) -> cg.Tensor:
        """Keep all variables of the model alive until here."""
        return cg.ops.keep_alive(y, x, *self._model_variables)

    # -- functions -----------------------------------------------------------------------------------------------------

    def pointwise(self, function: str, x: cg.Tensor) -> cg.Tensor:
        """Apply a function: the tanh form of GELU is eight ops, and the module's input lives until it returns."""
        if function != "gelu_tanh":
            return super().pointwise(function, x)
        half = 0.5 * x
        y = 1.0 + cg.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3.0))
        return cg.ops.keep_alive(half * y, x)

    def rms_norm(self, x: cg.Tensor, *, name: str) -> cg.Tensor:
        """Normalize in separate ops, in fp32, and cast back."""
        with cg.scope(name):
            wide = cg.ops.cast(x, "fp32")
            variance = cg.reduce(wide**2.0, "b s d -> b s 1", "mean")
            y = cg.ops.cast(wide * cg.ops.pointwise("rsqrt", variance + 1e-6), x.dtype)
            return cg.ops.keep_alive(x.graph.param("weight", x.shape[-1:]) * y, variance, wide)

    def create_mask(self, positions: cg.Tensor, kernel: str) -> None:
        """Create the additive mask (b, 1, s, s) for eager attention: 0 where a query sees a key."""
        if kernel != "eager":
            return
        with cg.scope("mask"):
            B = cg.dims("B")
            queries = cg.ops.expand(positions, "s -> b 1 s 1", b=B)
            keys = cg.ops.expand(positions, "s -> b 1 1 s", b=B)
            visible = cg.ops.pointwise("less_equal", keys, queries)
            self._mask = self.keep_for_model(cg.ops.pointwise("where", visible, 0.0, _MASKED_SCORE, dtype=self._dtype))

    def rotary_tables(self, positions: cg.Tensor, size: sympy.Expr) -> tuple[cg.Tensor, cg.Tensor]:
        """Compute cosines and sines for all elements of a head; both halves are equal."""
        with cg.scope("rope"):
            frequencies = positions.graph.buffer("inv_freq", (size / 2,), dtype="fp32")
            positions.graph.buffer("original_inv_freq", (size / 2,), dtype="fp32")
            angles = cg.ops.cast(cg.rearrange(positions, "s -> 1 s 1"), "fp32") * frequencies
            doubled = cg.ops.concat([angles, angles])
            cos, sin = (cg.ops.pointwise(f, doubled) * 1.0 for f in ("cos", "sin"))
            cos = cg.ops.cast(cos, self._dtype)
            sin = cg.ops.keep_alive(cg.ops.cast(sin, self._dtype), angles, doubled)
        return self.keep_for_model(cos), self.keep_for_model(sin)

    def attention(self, q: cg.Tensor, k: cg.Tensor, v: cg.Tensor, kernel: str, p: float) -> cg.Tensor:
        """Apply attention in separate ops, or in one kernel if there is no mask."""
        if self._mask is None:
            y = cg.attention(q, k, v, kernel=kernel, p=p)
            return cg.rearrange(y, "b h s k -> b s (h k)", name="attention/merge")
        with cg.scope("attention"):
            repeats = q.shape[1] / k.shape[1]
            if repeats != 1:
                k, v = _repeat_kv(k, repeats), _repeat_kv(v, repeats)
            scores = _matmul(q, k.mT) * 1.0
            scores = scores + self._mask
            y = cg.ops.cast(cg.softmax(cg.ops.cast(scores, self._softmax or scores.dtype)), v.dtype)
            y = cg.dropout(cg.ops.keep_alive(y, scores), p)
            self._layer_variables.append(y)  # the module also returns the probabilities
            return cg.ops.keep_alive(cg.rearrange(_matmul(y, v), "b h s k -> b s (h k)", name="merge"), k, v)

    def self_attention(
        self, x: cg.Tensor, heads: sympy.Expr, size: sympy.Expr, *, groups: sympy.Expr,
        rope: tuple[cg.Tensor, cg.Tensor], kernel: str, bias: bool, p: float,
    ) -> cg.Tensor:  # fmt: skip
        """Apply attention with rotary positions in separate ops, with the lifetimes of the module's variables."""
        qkv = [
            cg.linear(x, "b s d -> b s h k", h=n, k=size, bias=bias, name=f"attention/{c}")
            for c, n in (("q", heads), ("k", groups), ("v", groups))
        ]
        q, k, v = (cg.rearrange(t, "b s h k -> b h s k") for t in qkv)
        with cg.scope("attention"):
            queries, keys = _rotary(q, *rope), _rotary(k, *rope)
            keys = cg.ops.keep_alive(keys, q, k)  # both variables are reassigned after both rotations
        y = self.attention(queries, keys, v, kernel, p)
        y = cg.linear(y, "b s e -> b s d", d=x.shape[2], bias=bias, name="attention/proj")
        return cg.ops.keep_alive(y, queries, keys, v)


def _rotary(x: cg.Tensor, cos: cg.Tensor, sin: cg.Tensor) -> cg.Tensor:
    """Rotate by multiplication: x * cos + rotate_half(x) * sin."""
    straight = x * cg.rearrange(cos, "1 s k -> 1 1 s k")
    half = x.shape[-1] / 2
    first, last = x[..., :half], x[..., half:]
    rotated = cg.ops.concat([-last, first])
    return straight + rotated * cg.rearrange(sin, "1 s k -> 1 1 s k")


def _repeat_kv(x: cg.Tensor, repeats: sympy.Expr) -> cg.Tensor:
    """Repeat each KV head for all query heads that share it."""
    return cg.rearrange(cg.ops.expand(x, "b g s k -> b g r s k", r=repeats), "b g r s k -> b (g r) s k")


def _matmul(a: cg.Tensor, b: cg.Tensor) -> cg.Tensor:
    """Multiply batched matrices as torch.matmul does: an operand with heads inside positions is copied first."""
    y = cg.rearrange(a, "b h i j -> (b h) i j") @ cg.rearrange(b, "b h i j -> (b h) i j")
    return cg.rearrange(y, "(b h) i j -> b h i j", h=a.shape[1])
