"""Where torch is not installed, tests that it is the oracle of are left out; all others run."""

import gc
import os
import re
import signal
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from budget import is_plain
from hypothesis import HealthCheck, settings

# the first two are limits in seconds of the clock, which a busy machine passes; a plain run is always the same
settings.register_profile(
    "costgraph", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=is_plain()
)
settings.load_profile("costgraph")

# `nohup` and background jobs of a script ignore Ctrl-C, and children would inherit that: those here are interrupted
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# a worker for each processor: threads of torch beside it would wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")

# some machines forbid compiled files: every process would compile the whole library and the tests again
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
sys.dont_write_bytecode = False

# graphs are cycles of many small objects that live: to look for dead ones at each 700 takes a tenth of a run
gc.set_threshold(50_000, 20, 100)

TESTS = Path(__file__).resolve().parent
IMPORT = re.compile(r"^(?:from|import) (\w+)", re.MULTILINE)


@cache
def torch_is_missing():
    try:
        import_module("torch.nn")
    except ImportError:
        return True
    return False


@cache
def modules():
    """Files by the name under which another test imports them."""
    return {path.stem: path for path in TESTS.rglob("*.py")}


@cache
def needs_torch(name):
    """Whether a module imports torch when it is imported, itself or by another one of the tests."""
    path = modules().get(name)
    if path is None:
        return name == "torch"
    return any(needs_torch(other) for other in IMPORT.findall(path.read_text(encoding="utf-8")) if other != name)


def pytest_ignore_collect(collection_path):
    left_out = collection_path.suffix == ".py" and torch_is_missing() and needs_torch(collection_path.stem)
    return True if left_out else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give two workers a half each, then half of what the other has left: most files, and their caches, are of one."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def set_aside():
    """Keep what lives from being looked through by each later collection: measurements and traces ask for many."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish():
    set_aside()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    if nextitem is not None and nextitem.path != item.path:  # fixtures of the file are gone, what it cached stays
        set_aside()
