"""Run directories for tests of what is read from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_fixtures import write_run


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str = "20250102-030405-s0", **options: Any) -> Path:
        return write_run(tmp_path / "experiments" / options.get("experiment", "dreamer_v3_cartpole") / name, **options)

    return make
