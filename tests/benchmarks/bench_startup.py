"""Startup time: the import, graph files and zoo models."""

import json
import subprocess
import sys

import pytest
from bench_derivation import residual
from limits import PROCESS
from timing import best, growth, once

import costgraph as cg
from costgraph import models

IMPORTS = """
import sys
from time import process_time
start = process_time()
import sympy, networkx, numpy
middle = process_time()
# the bytecode of a checkout may be missing, that of an installed package is not
sys.dont_write_bytecode, sys.pycache_prefix = False, sys.argv[1]
import costgraph
print(middle - start, process_time() - start)
"""


def test_import_costs_little_more_than_what_it_imports(benchmark, tmp_path):
    def times():
        command = [sys.executable, "-c", IMPORTS, str(tmp_path)]
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PROCESS)
        return map(float, run.stdout.split())

    benchmark.pedantic(times, rounds=1)
    theirs, ours = map(min, zip(*(times() for _ in range(7)), strict=True))
    benchmark.extra_info["milliseconds"] = ours * 1e3
    benchmark.extra_info["milliseconds, sympy, networkx and numpy"] = theirs * 1e3
    benchmark.extra_info["ratio"] = ours / theirs
    # the ratio depends on the CPU: the same commit (fd0938a) has 1.19 on an AMD EPYC and 1.41 on an Intel Xeon, where
    # this revision has 1.35 and, after other benchmarks, 1.52
    assert ours / theirs <= 1.6


def test_loading_a_file_grows_in_proportion_to_its_size(benchmark, tmp_path):
    times = {}
    for ops in (10**2, 10**3, 10**4):
        path = tmp_path / f"{ops}.json"
        cg.save(residual(ops), path)
        times[path.stat().st_size] = min(once(lambda path=path: cg.load(path)) for _ in range(10**4 // ops // 10 + 1))
    path = tmp_path / "1000.json"
    load, text, declare = best(5, lambda: cg.load(path), lambda: json.loads(path.read_text()), lambda: residual(10**3))
    benchmark.extra_info |= {f"seconds of {size} bytes": seconds for size, seconds in times.items()}
    benchmark.extra_info["growth exponent"] = growth(times)
    benchmark.extra_info["ratio to json.load"] = load / text
    benchmark.extra_info["ratio to declaring it"] = load / declare
    benchmark.pedantic(cg.load, (path,), rounds=3)
    assert growth(times) <= 1.15
    # loading declares each op anew, with all checks
    assert load / declare <= 5


def test_a_model_of_the_zoo_is_declared_as_fast_as_torch_makes_its_modules(benchmark):
    torch = pytest.importorskip("torch")
    from plain_torch import LLAMA_7B, Llama

    def modules():
        with torch.device("meta"):
            return Llama(**LLAMA_7B)

    ours, theirs = best(10, lambda: models.load("llama-2-7b"), modules)
    benchmark.extra_info["milliseconds"] = ours * 1e3
    benchmark.extra_info["milliseconds, modules on meta"] = theirs * 1e3
    benchmark.extra_info["ratio"] = theirs / ours
    benchmark.pedantic(models.load, ("llama-2-7b",), rounds=5)
    assert ours <= 2 * theirs


def test_loading_and_reporting_every_model(benchmark):
    """A question about a named model should be answered interactively; GPT-2 is the baseline of the slowest one."""

    def asked(name):
        open_sizes = {"B": 1, "S": 128, "M": 128}
        g = models.load(name)
        used = {s.name for s in cg.flops(g).free_symbols}
        str(cg.report(g, "h100-sxm", **{k: v for k, v in open_sizes.items() if k in used}))

    asked("gpt2")
    times = {name: once(lambda name=name: asked(name)) for name in models.names()}
    slowest = max(times, key=times.get)
    benchmark.extra_info["models"] = len(times)
    benchmark.extra_info["seconds, the slowest"] = times[slowest]
    benchmark.extra_info["seconds, the median"] = sorted(times.values())[len(times) // 2]
    benchmark.extra_info["seconds, gpt2"] = times["gpt2"]
    benchmark.extra_info[f"ratio to gpt2 of the slowest, {slowest}"] = times[slowest] / times["gpt2"]
    benchmark.pedantic(asked, ("gpt2",), rounds=3)
    assert times[slowest] <= 40 * times["gpt2"]
