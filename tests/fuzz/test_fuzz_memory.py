"""Hostile inputs stay within a memory limit, in a separate process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from limits import PROCESS

HERE = Path(__file__).resolve().parent


@pytest.mark.long
def test_hostile_inputs_need_little_memory():
    paths = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parent.parent)])
    done = subprocess.run(
        [sys.executable, str(HERE / "worst.py")],
        capture_output=True, text=True, timeout=PROCESS, check=False, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
