"""Finds and loads libsinkhorn.so."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_NAME = "libsinkhorn.so"


def _find() -> Path:
    named = os.environ.get("SINKHORN_LIBRARY")
    if named:
        path = Path(named)
        if not path.is_file():
            raise ImportError(f"SINKHORN_LIBRARY={named}: no such file")
        return path
    package = Path(__file__).resolve().parent
    build = Path(os.environ.get("SINKHORN_BUILD_DIR", package.parents[1] / "build" / "release"))
    # Beside the package; in a checkout's build; in an install tree, where we are lib/python/sinkhorn.
    places = [package / _NAME, build / _NAME, package.parents[1] / _NAME]
    for path in places:
        if path.is_file():
            return path
    raise ImportError(
        f"{_NAME} was found in none of {', '.join(str(p.parent) for p in places)}; "
        "run `make build`, or set SINKHORN_LIBRARY to its path"
    )


library_path: Path = _find()
"""The library that this process runs."""

torch.ops.load_library(str(library_path))
