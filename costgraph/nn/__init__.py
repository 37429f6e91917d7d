"""Neural network layers, composed of public ops; their costs follow from these ops."""

from ..ops.elementwise import dropout
from .activations import (
    gelu,
    log_softmax,
    relu,
    segment_softmax,
    sigmoid,
    silu,
    softmax,
    tanh,
)
from .attention import (
    attention,
    cross_attention,
    latent_attention,
    patch_merging,
    self_attention,
    window_bias,
    window_merge,
    window_partition,
)
from .conv import (
    adaptive_pool,
    conv,
    conv_transpose,
    pool,
    upsample,
)
from .embeddings import (
    embedding,
    patch_embedding,
    relative_bias,
    rotary,
    rotary_tables,
    tied_head,
    timestep_embedding,
)
from .linear import gated_mlp, linear, mlp
from .losses import binary_cross_entropy, cross_entropy
from .moe import experts, moe, router
from .norms import batch_norm, group_norm, layer_norm, rms_norm
from .recommendation import dot_interaction, embedding_bag
from .recurrent import (
    causal_conv,
    cumulative_sum,
    gru,
    head_norm,
    lstm,
    recurrence,
    scan_kernel,
    token_shift,
)
from .stack import layers
from .vision import inverted_residual, squeeze_excitation, stochastic_depth

__all__ = [
    "adaptive_pool",
    "attention",
    "batch_norm",
    "binary_cross_entropy",
    "causal_conv",
    "conv",
    "conv_transpose",
    "cross_attention",
    "cross_entropy",
    "cumulative_sum",
    "dot_interaction",
    "dropout",
    "embedding",
    "embedding_bag",
    "experts",
    "gated_mlp",
    "gelu",
    "group_norm",
    "gru",
    "head_norm",
    "inverted_residual",
    "latent_attention",
    "layer_norm",
    "layers",
    "linear",
    "log_softmax",
    "lstm",
    "mlp",
    "moe",
    "patch_embedding",
    "patch_merging",
    "pool",
    "recurrence",
    "relative_bias",
    "relu",
    "rms_norm",
    "rotary",
    "rotary_tables",
    "router",
    "scan_kernel",
    "segment_softmax",
    "self_attention",
    "sigmoid",
    "silu",
    "softmax",
    "squeeze_excitation",
    "stochastic_depth",
    "tanh",
    "tied_head",
    "timestep_embedding",
    "token_shift",
    "upsample",
    "window_bias",
    "window_merge",
    "window_partition",
]
