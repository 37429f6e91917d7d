"""Mixtures of experts and latent attention: the declarations of the zoo with the sizes that a row states."""

from fractions import Fraction

from published_rows import derives
from shared import load

import costgraph as cg


def mixtral(row):
    n = row["inputs"]
    sizes = {"L": n["L"], "D": n["D"], "H": n["H"], "G": n["Hkv"], "K": n["dh"], "V": n["V"]}
    return load("mixtral-8x7b", symbolic=True), sizes | {"E": n["experts"], "k": n["topk"], "Fe": n["Fe"]}


@derives("params-mixtral-8x7b")
def mixtral_params(row):
    g, sizes = mixtral(row)
    return cg.param_count(g, **sizes)


@derives("active-mixtral-8x7b")
def mixtral_active(row):
    g, sizes = mixtral(row)
    return cg.param_count(g, active=True, **sizes)


#: Symbols of the declaration by the fields of DeepSeek's own configurations.
FIELDS = {
    "vocab_size": "V", "dim": "D", "inter_dim": "F", "moe_inter_dim": "Fe", "n_layers": "L", "n_dense_layers": "Ld",
    "n_heads": "H", "n_routed_experts": "E", "n_shared_experts": "Es", "n_activated_experts": "k",
    "n_expert_groups": "Eg", "n_limited_groups": "kg", "q_lora_rank": "Cq", "kv_lora_rank": "C",
    "qk_nope_head_dim": "Kn", "qk_rope_head_dim": "Kr", "v_head_dim": "Kv",
}  # fmt: skip


def deepseek(row):
    sizes = {FIELDS[name]: n for name, n in row["inputs"].items() if name in FIELDS}
    return load("deepseek-v2", symbolic=True, scale=row["inputs"]["route_scale"]), sizes


@derives("dsv2-236b-params")
def deepseek_params(row):
    g, sizes = deepseek(row)
    return Fraction(cg.param_count(g, **sizes), 10**9)


@derives("dsv2-236b-active")
def deepseek_active(row):
    g, sizes = deepseek(row)
    return Fraction(cg.param_count(g, active=True, **sizes), 10**9)
