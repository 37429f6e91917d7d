"""BERT: a bidirectional encoder with learned positions, token types, post-LayerNorm and biases.

Sizes: Devlin et al. 2018 (arXiv 1810.04805), section 3, and the `config.json` of google-bert/bert-base-uncased and
bert-large-uncased. Op order: `BertModel`, with its pooler, and `BertForMaskedLM` in transformers.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import costgraph as cg

from .blocks import bidirectional_attention, block, with_dropout
from .config import Config
from .family import Family, Preset

#: Heads by architecture, as keyword arguments of the declaration.
HEADS = {
    "BertModel": {},
    "BertForMaskedLM": {"head": "masked-lm"},
    "BertForSequenceClassification": {"head": "sequence"},
    "BertForTokenClassification": {"head": "token"},
}


def bert(
    name: str, attention: str, dropout: float, dtype: str,
    *, head: Literal["pooler", "masked-lm", "sequence", "token"] = "pooler", activation: str = "gelu",
    tied: bool = True,
) -> cg.Graph:  # fmt: skip
    """Declare BERT: tokens and token types (B, S) to features (B, S, D) and a pooled vector (B, D).

    `head` may be masked-lm, with logits (B, S, V), sequence (B, C) or token (B, S, C). With `tied`, the masked language
    model shares the embedding table.
    """
    B, S, D, H, F, L, V, P, kinds = cg.dims("B S D H F L V P kinds")
    act = partial(cg.ops.pointwise, activation)

    mixer = bidirectional_attention(attention, dropout, H, D / H)
    mlp = partial(cg.nn.mlp, f=F, activation=act, bias=True, p=dropout)
    layer = block(attention=with_dropout(mixer, dropout), mlp=mlp, norm=cg.layer_norm, norms="behind")

    with cg.Graph(name, dtype=dtype) as g:
        g.assume("S <= P")
        tokens, types = (g.input(n, (B, S), dtype="int64") for n in ("tokens", "types"))
        table = g.param("tokens/table", (V, D))
        x = cg.embedding(tokens, table) + cg.embedding(types, g.param("types/table", (kinds, D)))
        x = x + cg.embedding(cg.ops.arange(S), g.param("positions/table", (P, D)))
        x = cg.dropout(cg.layer_norm(x, name="norm"), dropout)
        x = cg.repeat(L, layer, x, name="layers")
        for output in _head_outputs(x, table, head, act, dropout, tied=tied):
            g.output(output)
        g.loss = None if head == "pooler" else "cross_entropy"
    return g


def _head_outputs(
    x: cg.Tensor, table: cg.Tensor, head: str, act: partial[cg.Tensor], dropout: float, *, tied: bool
) -> list[cg.Tensor]:
    """Return the outputs of a head."""
    D, V, C = cg.dims("D V C")
    if head == "masked-lm":
        y = cg.layer_norm(act(cg.linear(x, "b s d -> b s e", e=D, bias=True, name="head/transform")), name="head/norm")
        weight = cg.ops.transpose(table) if tied else None
        if not tied:
            x.graph.param("head/tied_bias", (V,))  # the reference module has it in addition to the head's bias
        return [cg.linear(y, "b s d -> b s v", v=V, bias=True, weight=weight, name="head")]
    if head == "token":
        return [cg.linear(cg.dropout(x, dropout), "b s d -> b s c", c=C, bias=True, name="head")]
    first = cg.rearrange(x[:, :1], "b 1 d -> b d", name="first")
    pooled = cg.tanh(cg.linear(first, "b d -> b e", e=D, bias=True, name="pooler"))
    if head == "sequence":
        return [cg.linear(cg.dropout(pooled, dropout), "b d -> b c", c=C, bias=True, name="head")]
    return [x, pooled]


def read(c: Config) -> Preset:
    """Read a transformers `BertConfig`."""
    c.expect("is_decoder", False)
    c.expect("add_cross_attention", False)
    c.expect("position_embedding_type", "absolute")
    c.ignore("hidden_dropout_prob", "attention_probs_dropout_prob", "pooler_fc_size", "pooler_num_attention_heads")
    c.ignore("pooler_num_fc_layers", "pooler_size_per_head", "pooler_type", "directionality")
    sizes = {"D": c.size("hidden_size"), "H": c.size("num_attention_heads"), "F": c.size("intermediate_size")}
    sizes |= {"L": c.size("num_hidden_layers"), "V": c.size("vocab_size"), "P": c.size("max_position_embeddings")}
    sizes |= {"kinds": c.size("type_vocab_size")}
    structure = {"activation": c.activation("hidden_act"), **HEADS[c.architecture]}
    tied = c.flag("tie_word_embeddings")
    if "head" not in structure:
        return Preset(sizes, structure)
    return Preset(sizes | {"C": c.labels()}, structure | {"tied": tied})


def _sizes(D: int, H: int, L: int) -> Preset:
    return Preset({"D": D, "H": H, "F": 4 * D, "L": L, "V": 30522, "P": 512, "kinds": 2})


FAMILIES = (
    Family(
        bert,
        {"bert-base": _sizes(768, 12, 12), "bert-large": _sizes(1024, 16, 24)},
        architectures=dict.fromkeys(HEADS, "bert"),
        read=read,
        legend={"kinds": "token types"},
    ),
)
