"""The store that RocketMQ left with everything pending; what the processes append is compared with its records."""

from __future__ import annotations

import pytest

from golden_stores import unpack
from pending_store import PendingStore, read_pending_store


@pytest.fixture(scope="session")
def pending(tmp_path_factory: pytest.TempPathFactory) -> PendingStore:
    """The golden store ``semantics``. Shared by all tests: read only."""
    return read_pending_store(unpack("semantics", tmp_path_factory.mktemp("golden-semantics")).root)
