"""A pytest plugin for tests of the SDK in another Python: their stack runs already, at LORRY_URL, in the first one.

python3.13 -m pytest --noconftest -p tests.seeds.running_stack tests/seeds/test_dialects.py
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

import lorry


@pytest.fixture(scope="session")
def stack() -> SimpleNamespace:
    return SimpleNamespace(url=os.environ["LORRY_URL"])


@pytest.fixture
def service(stack: SimpleNamespace) -> lorry.ServiceClient:
    return lorry.ServiceClient(base_url=stack.url)


@pytest.fixture
def make_stack() -> None:
    pytest.skip("needs a worker of its own, and workers need torch")


@pytest.fixture
def tiny_qwen3() -> None:
    pytest.skip("needs torch")
