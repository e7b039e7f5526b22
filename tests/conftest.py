import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch):
    """test_kernels.py sets Triton's interpreter for its process, which the tests here may share."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if kernels := sys.modules.get("routing_kernels"):
        monkeypatch.setattr(kernels, "INTERPRETED", False)
