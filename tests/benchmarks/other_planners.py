"""Configurations per second of llm-analysis and calculon; run it in an interpreter that has both.

python other_planners.py CALCULON prints a JSON of rates: CALCULON is a checkout of calculon-ai/calculon with its
models, systems and example; llm-analysis comes from PyPI. Both need older versions of transformers or pandas than the
other tests.
"""

import importlib.metadata
import json
import logging
import sys
from pathlib import Path
from time import process_time


def rate(call):
    """Return calls per CPU second: the best among three runs lasting at least half a second."""
    rates = []
    for _ in range(3):
        done, start = 0, process_time()
        while (spent := process_time() - start) < 0.5:
            call(done)
            done += 1
        rates.append(done / spent)
    return max(rates)


def llm_analysis():
    """A training step for Llama 7B on a node with eight H100, as in its own example."""
    from llm_analysis import analysis, config

    logging.disable(logging.CRITICAL)
    one = analysis.LLMAnalysis(
        config.get_model_config_by_name("decapoda-research_llama-7b-hf"),
        config.get_gpu_config_by_name("h100-sxm-80gb"),
        config.get_dtype_config_by_name("w16a16e16"),
        config.ParallelismConfig(tp_size=8, sp_size=8),
        flops_efficiency=1.0,
        hbm_memory_efficiency=1.0,
    )
    return {
        "training": rate(
            lambda i: one.training(batch_size_per_gpu=1 + i % 4, gradient_accumulation_steps=1, seq_len=128 + i % 16)
        ),
        "latency of a forward pass": rate(lambda i: one.get_latency_fwd(1 + i % 64, 128 + i % 16)),
    }


def calculon(top):
    """A training step for GPT-3 175B on 512 H100, compiled and run as by its command line."""
    sys.path.insert(0, str(top))
    from calculon import System, io
    from calculon.llm import Llm

    example = io.read_json_file(str(top / "examples/3072_t4_p64_d12_mbs4_full.json"))
    ways = {"num_procs": 512, "tensor_par": 8, "pipeline_par": 8, "data_par": 8}
    execution = {**example, **ways, "batch_size": 512, "microbatch_size": 1}
    app = Llm.Application(io.read_json_file(str(top / "models/gpt3-175B.json")))
    system = System(io.read_json_file(str(top / "systems/h100_80g_nvl8.json")))

    def once(_):
        model = Llm(app, logging.getLogger())
        model.compile(system, Llm.Execution.from_json(execution))
        model.run(system)
        return model.get_total_time()

    assert once(0) > 0
    return {"training": rate(once)}


if __name__ == "__main__":
    found = {"llm-analysis": llm_analysis(), "calculon": calculon(Path(sys.argv[1]).resolve())}
    print(json.dumps({"version of llm-analysis": importlib.metadata.version("llm-analysis"), **found}))
