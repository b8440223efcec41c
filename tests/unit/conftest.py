"""Fixtures of unit tests, which pass on a machine where nothing was served yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import models


@pytest.fixture(autouse=True)
def no_models_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that an earlier run made here is on no fresh machine."""
    monkeypatch.setattr(models, "MODELS_DIR", tmp_path / "models")
