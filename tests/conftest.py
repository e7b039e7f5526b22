import pytest


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch):
    """test_kernels.py runs the kernels through Triton's interpreter; the scripts tested here must not notice, in this process or in theirs."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("routing_kernels.INTERPRETED", False)
