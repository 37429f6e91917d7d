"""Write the page `docs/accuracy/benchmarks.md` from the record of pytest-benchmark.

python -m pytest -q tests/benchmarks/bench_*.py --benchmark-json=benchmarks.json
python tests/benchmarks/table.py benchmarks.json > docs/accuracy/benchmarks.md
"""

import json
import sys
from pathlib import Path

HEAD = """\
# Benchmarks

How long do you wait for costgraph? This page shows a record of {date}, on {machine}; {versions}. {load}

```console
$ export COSTGRAPH_BENCHMARKS=long
$ python -m pytest -q tests/benchmarks/bench_*.py --benchmark-json=benchmarks.json
$ python tests/benchmarks/table.py benchmarks.json > docs/accuracy/benchmarks.md
```

All times are CPU seconds, of one call or the best of several; they depend on the machine. Tests assert only ratios of
two times measured in turn, and growth exponents: the slope of log time over log size, 1 if time is proportional to
size. Unless its name says otherwise, a ratio above 1 says how many times faster costgraph is. `.ci/run` runs the
benchmarks.
"""

#: Description and figures of each benchmark, in page order.
ABOUT = {
    "test_time_grows_in_proportion_to_the_ops[chain]": (
        "Declare a chain of ReLUs, derive FLOPs, bytes and peak. The exponent exceeds 1 because of Python's "
        "garbage collector, from about 10^4 ops on."
    ),
    "test_time_grows_in_proportion_to_the_ops[residual]": (
        "The same for residual blocks with six ops and a weight each. Three ops read the input of a block."
    ),
    "test_closed_form_peak_against_the_live_sets_that_survive": (
        "Closed-form peak, by the number of live sets that no other set dominates. Each set is compared with each."
    ),
    "test_depth_costs_nothing": (
        "Bind all formulas of llama-2-7b with 3200 layers and with 32. The ratio is deep over shallow: "
        "depth is a symbol until then."
    ),
    "test_deriving_formulas_against_counting_with_torch": (
        "Declare llama-2-7b and derive FLOPs, bytes and peak, against one run of torch's FlopCounterMode on "
        "the meta device, which counts FLOPs at one size."
    ),
    "test_time_of_a_step_grows_in_proportion_to_the_ops[perceptron]": (
        "Declare an unrolled perceptron with two ops per layer, build a training step with AdamW, derive "
        "FLOPs, bytes and peak. A step has about seven ops per forward op."
    ),
    "test_time_of_a_step_grows_in_proportion_to_the_ops[residual]": (
        "The same for residual blocks with six ops and a weight each."
    ),
    "test_peak_of_a_step_against_memtracker[gpt2]": (
        "Declare GPT-2, build a step with AdamW and derive its peak for all sizes, against torch's "
        "MemTracker on fake tensors, which follows two steps at one size. Both peaks agree to 0.1 %."
    ),
    "test_peak_of_a_step_against_memtracker[llama-2-7b]": "The same for Llama with the sizes of llama-2-7b.",
    "test_peak_of_a_step_with_every_size_open": (
        "Peak of a bf16-mixed step with AdamW and every size open: declare, build, derive, and prune redundant regimes."
    ),
    "test_trace_of_a_step_against_memtracker": (
        "Trace a step of transformers' GPT-2 with AdamW once, batch and length open, against MemTracker at "
        "one size. Both peaks agree to 4 KiB; one trace serves all sizes."
    ),
    "test_loading_and_reporting_every_model": (
        "Load and report every model of the zoo on an H100, for 128 tokens or an image. The slowest model over GPT-2."
    ),
    "test_order_of_a_contraction_against_opt_einsum[five tensors]": (
        "Find the cheapest contraction order of five tensors with numeric sizes. opt_einsum is faster; it "
        "cannot take symbols."
    ),
    "test_order_of_a_contraction_against_opt_einsum[four tensors]": "The same for four tensors.",
    "test_maximum_against_that_of_sympy": (
        "`cg.Max` of ten sums with ten terms, against `sympy.Max`. A SymPy operation is given up after "
        "eight seconds; its ratio is then a lower bound."
    ),
    "test_sweep_against_lambdify": "A formula with 20 terms at a million points, against sympy.lambdify.",
    "test_sweep_of_a_peak_against_lambdify_of_its_cases": (
        "A peak with several regimes at a million points, against sympy.lambdify of the regimes and NumPy's maximum."
    ),
    "test_sweep_of_a_time_against_lambdify_and_rooflines": (
        "Estimated time of llama-3-8b on an H100 at a million points of batch and length, against "
        "sympy.lambdify and against as many calls of `roofline`."
    ),
    "test_a_peak_at_one_point_against_a_loop_over_its_cases": (
        "A peak with several regimes at one point, exactly, against a plain Python loop over the regimes."
    ),
    "test_evaluations_a_second_beside_other_planners": (
        "Formulas of llama-2-7b on an H100 at a million points, and one by one with all digits. Next to "
        "them, single configurations with llm-analysis 0.2.2 (Llama 7B, tensor and sequence parallel over "
        "eight) and calculon at commit caa4b11 (GPT-3 175B on 512), each in its own interpreter. These "
        "planners answer different questions; compare how many configurations a search can visit. Runs if "
        "COSTGRAPH_PLANNERS names them."
    ),
    "test_import_costs_little_more_than_what_it_imports": (
        "`import costgraph` in a fresh interpreter, over importing its dependencies alone."
    ),
    "test_loading_a_file_grows_in_proportion_to_its_size": (
        "`cg.load` of residual blocks. The ratios are for 10^3 ops: over reading the same text, and over "
        "declaring the graph."
    ),
    "test_a_model_of_the_zoo_is_declared_as_fast_as_torch_makes_its_modules": (
        "`cg.models.load` of llama-2-7b, against building the PyTorch modules on the meta device."
    ),
    "test_frames_while_a_slider_is_dragged[llama-3-8b]": (
        "Export the page with sliders, then drag a slider in headless Chromium with the training view open. "
        "A 60 Hz screen leaves 16.7 ms per frame for script, layout and paint."
    ),
    "test_frames_while_a_slider_is_dragged[deepseek-v3]": "The same for deepseek-v3.",
}


def figure(value):
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def wrapped(text, width=120):
    lines, line = [], ""
    for word in text.split():
        if len(line) + len(word) + 1 > width:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return "\n".join([*lines, line])


def machine_of(info):
    cpu = info.get("cpu", {})
    name = cpu.get("brand_raw") or info.get("processor") or info.get("machine")
    return (
        f"{name}, {cpu.get('count') or '?'} cores, {info['system']} {info['release']}, Python {info['python_version']}"
    )


def head(record):
    info = record["machine_info"]
    load = info.get("load", 0)
    busy = f"Other work ran on the machine: its load was {load:.1f} when the run began." if load >= 0.5 else ""
    text = HEAD.format(
        date=record["datetime"][:10],
        machine=machine_of(info),
        versions=", ".join(f"{k} {v}" for k, v in info.get("versions", {}).items()),
        load=busy,
    )
    title, record_line, *rest = text.split("\n\n")
    return "\n\n".join([title, wrapped(record_line), *rest])


def section(benchmark):
    title = benchmark["name"].removeprefix("test_").replace("_", " ")
    rows = "\n".join(f"| {name} | {figure(value)} |" for name, value in benchmark["extra_info"].items())
    return f"\n## {title}\n\n{wrapped(ABOUT[benchmark['name']])}\n\n| figure | value |\n|---|---|\n{rows}\n"


def page(record):
    """Return the page for a record: one section for each benchmark with figures."""
    benchmarks = {b["name"]: b for b in record["benchmarks"]}
    unknown = sorted(benchmarks.keys() - ABOUT.keys())
    if unknown:
        raise SystemExit(f"table.py: nothing is known of {', '.join(unknown)}, expected a line in ABOUT")
    return head(record) + "".join(section(benchmarks[name]) for name in ABOUT if name in benchmarks)


if __name__ == "__main__":
    sys.stdout.write(page(json.loads(Path(sys.argv[1]).read_text())))
