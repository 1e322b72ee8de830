"""Programs of the checkout that no package has, as modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def load(path: Path) -> Any:
    """Run a file and return its module, which nothing else finds."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
