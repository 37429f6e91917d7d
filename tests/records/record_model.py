"""The model, training step and forward pass of a raw record, declared with costgraph's public names.

Eager code is declared as it runs: torch's batched matmul copies strided heads, a separate op converts logits, and
variables of `forward` keep their tensors alive until it returns.
"""

from functools import cache

import costgraph as cg

B, S, V, D, H, F, L = cg.dims("B S V D H F L")

OPTIMIZERS = {
    "sgd": cg.SGD(),
    "adamw-for-loop": cg.AdamW(implementation="for-loop"),
    "adamw-foreach": cg.AdamW(implementation="foreach"),
    "adamw-fused": cg.AdamW(implementation="fused"),
}
#: The declaration's dtype and the step's precision policy; bf16 means pure bf16, including optimizer state.
PRECISIONS = {"fp32": ("fp32", None), "bf16": ("bf16", None), "bf16-mixed": ("fp32", "bf16-mixed")}


class Layers:
    """Layers of the model; `weights` is the stored dtype of linear weights, None for the graph's.

    With `held`, an operand stays alive until the op that converts it has returned, and a block's variables until the
    block has.
    """

    def __init__(self, p, fused, held, weights):
        self.p, self.fused, self.held, self.weights = p, fused, held, weights

    def hold(self, *variables):
        """Keep the variables' tensors alive until here, at no cost."""
        if self.held:
            cg.opaque("hold", list(variables), [], flops=0)

    def linear(self, x, size, name):
        with cg.scope(name):
            weight = x.graph.param("weight", (x.shape[-1], size), dtype=self.weights)
        y = cg.linear(x, "b s i -> b s o", weight=weight, name=name)
        self.hold(x)
        return y

    def attend(self, q, k, v):
        if self.fused:
            return cg.attention(q, k, v, causal=False, kernel="flash", p=self.p)
        q, k = cg.ops.contiguous_copy(q), cg.ops.contiguous_copy(k)
        scores = cg.einsum(q, k, "b h s k, b h t k -> b h s t", name="scores")
        scaled = cg.ops.pointwise("mul", scores, 1.0, name="scale")
        shares = cg.softmax(scaled)
        self.hold(scaled)
        shares = cg.dropout(shares, self.p)
        y = cg.einsum(shares, cg.ops.contiguous_copy(v), "b h s t, b h t k -> b h s k", name="reduce")
        self.hold(shares)
        return y

    def block(self, x):
        y = cg.layer_norm(x, name="n1")
        q, k, v = (cg.rearrange(self.linear(y, D, name), "b s (h k) -> b h s k", h=H) for name in "qkv")
        a = self.attend(q, k, v)
        new = x + cg.dropout(self.linear(cg.rearrange(a, "b h s k -> b s (h k)"), D, "o"), self.p)
        up = cg.gelu(self.linear(cg.layer_norm(new, name="n2"), F, "up"))
        out = new + cg.dropout(self.linear(up, D, "down"), self.p)
        self.hold(x, y, q, k, v, a, new)
        return out


@cache
def model(dtype, p, fused, held=False, weights=None):
    """Map tokens (B, S) to the loss; the tokens are their own targets."""
    layers = Layers(p, fused, held, weights)
    with cg.Graph("record", dtype=dtype) as g:
        t = g.input("t", (B, S), dtype="int64")
        x = cg.embedding(t, g.param("embed/table", (V, D)))
        x = cg.repeat(L, layers.block, x, name="blocks")
        logits = layers.linear(cg.layer_norm(x, name="norm"), V, "head")
        g.output(cg.cross_entropy(cg.ops.cast(logits, "fp32"), t))
        layers.hold(x)
    return g


def _policy(precision, device):
    dtype, policy = PRECISIONS[precision]
    return dtype, policy, None if policy is None else device


@cache
def step(optimizer, precision, p, fused, checkpoint, device):
    """Declare a whole training step."""
    dtype, policy, device = _policy(precision, device)
    again = cg.every_block() if checkpoint else None
    return cg.training_step(
        model(dtype, p, fused), optimizer=OPTIMIZERS[optimizer], precision=policy, checkpoint=again,
        autocast_device=device,
    )  # fmt: skip


@cache
def forward(precision, p, fused, device, held=True):
    """Declare a forward pass without gradients.

    With `held`, its memory is that of a second run in one autocast region: variables keep their tensors alive, and the
    linear weights are already converted.
    """
    dtype, policy, device = _policy(precision, device)
    weights = None if policy is None or not held else "bf16"
    return cg.apply_precision(model(dtype, p, fused, held, weights), policy, autocast_device=device)
