from pathlib import Path

import pytest

from costgraph.report.records import read_records


@pytest.fixture(scope="session")
def measured():
    """Return the project's published measurements."""
    return read_records(Path(__file__).parents[1] / "measured" / "published" / "gpus.json")
