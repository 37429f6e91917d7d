"""The page `docs/benchmarks.md`, out of the record that pytest-benchmark writes.

python -m pytest -q tests/benchmarks/bench_*.py --benchmark-json=benchmarks.json
python tests/benchmarks/table.py benchmarks.json > docs/benchmarks.md
"""

import json
import sys
from pathlib import Path

COMMAND = "COSTGRAPH_BENCHMARKS=long python -m pytest -q tests/benchmarks/bench_*.py --benchmark-json=benchmarks.json"

HEAD = """\
# Benchmarks

Measured, not derived: how long the library itself takes. The record is of {date}, on {machine}; {versions}. {load}

```sh
{command}
python tests/benchmarks/table.py benchmarks.json > docs/benchmarks.md
```

Seconds depend on the machine and are printed to give an idea. The tests assert ratios alone, of two times taken in turn
in one process, and exponents: the slope of a straight line through log time over log size, 1 where time is in
proportion to size. All are seconds of the processor, of one call or the best of several. They are no part of the
README's command, whose tests have no limit in seconds of the clock; `.ci/run` asks them, and what fails twice more.
A ratio above 1 says how many times faster costgraph is, unless its name says another thing.
"""

#: What each benchmark measures and what its figures mean, in the order of the page.
ABOUT = {
    "test_time_grows_in_proportion_to_the_ops[chain]": "A chain of ReLUs: declared, its FLOPs, bytes and peak derived."
    " What exceeds 1 in the exponent is Python's collector of cyclic garbage, at work from some 10^4 ops on.",
    "test_time_grows_in_proportion_to_the_ops[residual]": "The same for residual blocks of six ops and a weight each,"
    " in which three ops read what enters a block.",
    "test_closed_form_peak_against_the_live_sets_that_survive": "The peak as a closed form, by the number of live sets"
    " none of which another one dominates; each is compared with each.",
    "test_depth_costs_nothing": "All formulas of llama-2-7b with 3200 layers bound, over those with 32: the depth is a"
    " symbol until then. The ratio is the time of the deeper one over that of the other.",
    "test_deriving_formulas_against_counting_with_torch": "llama-2-7b declared and FLOPs, bytes and peak derived as"
    " formulas, against one count of FLOPs alone at one size by torch's FlopCounterMode on the meta device.",
    "test_time_of_a_step_grows_in_proportion_to_the_ops[perceptron]": "A perceptron of layers of two ops, all unrolled:"
    " declared, made a step of training with AdamW, its FLOPs, bytes and peak derived. A step has some seven ops for"
    " each of the forward pass.",
    "test_time_of_a_step_grows_in_proportion_to_the_ops[residual]": "The same for residual blocks of six ops and a"
    " weight each.",
    "test_peak_of_a_step_against_memtracker[gpt2]": "The peak of a step of GPT-2 with AdamW as a closed form in all"
    " sizes, declared, derived and bound, against torch's MemTracker on fake tensors, which follows two steps at one"
    " size; both give the same peak to a thousandth.",
    "test_peak_of_a_step_against_memtracker[llama-2-7b]": "The same for Llama with the sizes of llama-2-7b.",
    "test_peak_of_a_step_with_every_size_open": "The peak of a step in bf16-mixed with AdamW, no size bound: declared,"
    " made, derived, and what is never the largest left out.",
    "test_trace_of_a_step_against_memtracker": "A step of transformers' GPT-2 with AdamW traced once with batch and"
    " length open, against MemTracker on fake tensors, which follows one step at one size. Both give the same peak to"
    " 4 KiB, ours from one trace for all sizes.",
    "test_loading_and_reporting_every_model": "Every model of the zoo declared and its whole report for a prompt of 128"
    " tokens, or an image, made on an H100: the slowest one, over GPT-2.",
    "test_order_of_a_contraction_against_opt_einsum[five tensors]": "The cheapest order of a contraction of five"
    " tensors with numbers for sizes: a checked graph and its FLOPs here, the order and its FLOPs in opt_einsum, which"
    " is the faster one. Sizes that are symbols it cannot take.",
    "test_order_of_a_contraction_against_opt_einsum[four tensors]": "The same for four tensors.",
    "test_maximum_against_that_of_sympy": "`cg.Max` of ten sums of ten terms against `sympy.Max` of the same; an"
    " operation of sympy's is given up after eight seconds, its ratio is then at least what is printed.",
    "test_sweep_against_lambdify": "A formula of 20 terms over a million points, against sympy.lambdify.",
    "test_sweep_of_a_peak_against_lambdify_of_its_cases": "A peak that is a maximum of several cases over a million"
    " points, against sympy.lambdify of the cases and NumPy's maximum.",
    "test_sweep_of_a_time_against_lambdify_and_rooflines": "The estimated time of llama-3-8b on an H100 as a formula in"
    " batch and length over a million points, against sympy.lambdify, and against as many rooflines one by one.",
    "test_a_peak_at_one_point_against_a_loop_over_its_cases": "A peak with several cases at one point, exactly,"
    " against a loop over its cases in plain Python.",
    "test_evaluations_a_second_beside_other_planners": "Formulas of llama-2-7b on an H100 over a million points of"
    " batch and length, and one by one with all digits; beside them one configuration after the other by llm-analysis"
    " 0.2.2 of PyPI (Llama 7B, tensor and sequence parallel over eight) and calculon at commit caa4b11 of 2024-02-22"
    " (GPT-3 175B on 512), each in an interpreter of its own: they are asked for other figures beside these, and know"
    " other effects; what is compared is how many configurations a search can look at. It runs where"
    " COSTGRAPH_PLANNERS names them.",
    "test_import_costs_little_more_than_what_it_imports": "`import costgraph` in a fresh interpreter, what it imports"
    " included, over that of what it imports alone.",
    "test_loading_a_file_grows_in_proportion_to_its_size": "`cg.load` of residual blocks. The ratios are those of a"
    " graph of 10^3 ops: how many times as long it takes as to read the same text, and as to declare the graph.",
    "test_a_model_of_the_zoo_is_declared_as_fast_as_torch_makes_its_modules": "`cg.models.load` of llama-2-7b, against"
    " the modules of the same model on the meta device.",
    "test_frames_while_a_slider_is_dragged[llama-3-8b]": "The page with sliders of all default views: its export, and"
    " in a headless Chromium the view of a step of training while a slider moves in every frame, by the browser's own"
    " clock. A screen has 60 frames a second, 16.7 ms each, for the script, layout and paint",
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
        command=COMMAND,
    )
    first, second, *rest = text.split("\n\n")
    return "\n\n".join([first, wrapped(second), *rest])


def section(benchmark):
    title = benchmark["name"].removeprefix("test_").replace("_", " ")
    rows = "\n".join(f"| {name} | {figure(value)} |" for name, value in benchmark["extra_info"].items())
    return f"\n## {title}\n\n{wrapped(ABOUT[benchmark['name']])}\n\n| figure | value |\n|---|---|\n{rows}\n"


def page(record):
    """Return the page for a record: one section for each benchmark that has something to say."""
    found = {b["name"]: b for b in record["benchmarks"]}
    unknown = sorted(found.keys() - ABOUT.keys())
    if unknown:
        raise SystemExit(f"table.py: nothing is known of {', '.join(unknown)}, expected a line in ABOUT")
    return head(record) + "".join(section(found[name]) for name in ABOUT if name in found)


if __name__ == "__main__":
    sys.stdout.write(page(json.loads(Path(sys.argv[1]).read_text())))
