"""Add library versions and the CPU to the machine info of pytest-benchmark records."""

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# the training tests define the plain module whose step is benchmarked
sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

PACKAGES = ("costgraph", "sympy", "networkx", "numpy", "torch", "opt_einsum", "pytest-benchmark")


def versions():
    out = {}
    for name in PACKAGES:
        try:
            out[name] = version(name)
        except PackageNotFoundError:  # torch is optional
            continue
    return out


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info["versions"] = versions()
    machine_info["load"] = os.getloadavg()[0]
