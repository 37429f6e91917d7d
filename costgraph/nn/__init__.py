"""Layers, written with the public ops."""

from ..ops.stochastic import dropout
from .activations import gelu, relu, sigmoid, silu, tanh
from .attention import attention, self_attention
from .conv import conv, pool
from .cross_attention import cross_attention
from .embeddings import embedding, patch_embedding, relative_bias, tied_head, timestep_embedding
from .latent import latent_attention
from .linear import gated_mlp, linear, mlp
from .losses import binary_cross_entropy, cross_entropy
from .lstm import gru, lstm
from .moe import experts, moe, router
from .norms import batch_norm, group_norm, layer_norm, rms_norm
from .recommendation import dot_interaction, embedding_bag
from .recurrent import causal_conv, cumulative_sum, head_norm, recurrence, scan_kernel, token_shift
from .resizing import adaptive_pool, upsample
from .rotary import rotary, rotary_tables
from .segments import segment_softmax
from .softmax import log_softmax, softmax
from .stack import layers
from .transposed import conv_transpose
from .vision import inverted_residual, squeeze_excitation, stochastic_depth
from .windows import patch_merging, window_bias, window_merge, window_partition

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
