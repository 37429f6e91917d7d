"""Pytest configuration; without torch, tests that use it as the oracle are skipped."""

import gc
import os
import re
import signal
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from budget import is_plain
from hypothesis import HealthCheck, settings

# disable wall-clock limits, which a busy machine exceeds, and make plain runs deterministic
settings.register_profile(
    "costgraph", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=is_plain()
)
settings.load_profile("costgraph")

# `nohup` and background jobs ignore Ctrl-C and children inherit that, but tests interrupt their children
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One worker per processor, as torch's own threads would compete with them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# some machines disallow bytecode files, and then every process would compile the library and the tests again
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
sys.dont_write_bytecode = False

# graphs are cycles of many small live objects; the default collection threshold of 700 costs a tenth of a run
gc.set_threshold(50_000, 20, 100)
gc.disable()  # until all tests are collected: modules and test items stay alive

TESTS = Path(__file__).resolve().parent
LONG_CASES = TESTS / "long_cases.txt"
IMPORT = re.compile(r"^(?:from|import) (\w+)", re.MULTILINE)


@cache
def torch_is_missing():
    spec = find_spec("torch")
    return spec is None or spec.origin is None  # a directory without a module has no origin


@cache
def modules():
    """Map import names to test files."""
    return {path.stem: path for path in TESTS.rglob("*.py")}


@cache
def needs_torch(name):
    """Return whether importing a module imports torch, directly or through other test modules."""
    path = modules().get(name)
    if path is None:
        return name == "torch"
    return any(needs_torch(other) for other in IMPORT.findall(path.read_text(encoding="utf-8")) if other != name)


def pytest_ignore_collect(collection_path):
    left_out = collection_path.suffix == ".py" and torch_is_missing() and needs_torch(collection_path.stem)
    return True if left_out else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark the cases of `long_cases.txt`, whose calls other tests make as well; `calls_covered.py` chooses them."""
    if config.pluginmanager.hasplugin("calls_covered"):
        return
    left_out = {*LONG_CASES.read_text(encoding="utf-8").splitlines()}
    for item in items:
        if item.nodeid in left_out:
            item.add_marker(pytest.mark.long)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give each of two workers half of the tests, then half of the other's rest; tests in a file share caches."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def set_aside():
    """Freeze live objects, so that the frequent collections in measurements and traces skip them."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    if nextitem is not None and nextitem.path != item.path:  # fixtures of the file are gone, its caches remain
        set_aside()
