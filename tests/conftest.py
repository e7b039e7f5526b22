import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch):
    """test_kernels.py runs the kernels through Triton's interpreter; the scripts tested here must not notice."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("routing_kernels.INTERPRETED", False)
