"""Checkpoints saved by transformers match the declared models of their config.json."""

import pytest
from config_files import FILES, file_of
from lazy import lazy_import

import costgraph as cg

torch = pytest.importorskip("torch")
transformers = lazy_import("transformers")

#: One model for each way of fusing or splitting tensors: the rest takes long.
FEW = {"GPT2LMHeadModel", "LlamaForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM"}


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.long) for n in FILES]
)  # fmt: skip
def test_saved_checkpoint_matches_its_config(name, tmp_path):
    fields = file_of(name)
    module = getattr(transformers, fields["architectures"][0])
    config = module.config_class.from_dict(fields)
    module(config).save_pretrained(tmp_path)
    comparison = cg.compare_weights(cg.models.from_config(tmp_path, dtype="fp32"), tmp_path)
    assert comparison.agree, str(comparison)
    assert comparison.parameters[0] == cg.param_count(cg.models.from_config(tmp_path))
