"""Loads the two libraries once, and gives every test the same seed and thread count."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Iterator

# What the compiler cached for an operator of another build must not be taken for this one's.
_compiler_cache = tempfile.TemporaryDirectory(prefix="sinkhorn-inductor-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _compiler_cache.name
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import pytest  # noqa: E402
import torch  # noqa: E402

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "python")]

import support  # noqa: E402  (found through the path set above)
from browser import Browser, find_browser  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "each_form: run again for every form of the CPU kernels by test_cpu_forms.py"
    )
    # What tests start in a process of their own must find the same build.
    os.environ["SINKHORN_BUILD_DIR"] = str(support.BUILD)
    support.load_libraries()


def pytest_terminal_summary(terminalreporter) -> None:
    """How many tests wait for a GPU, whatever else is printed."""
    skipped = [report for report in terminalreporter.stats.get("skipped", [])
               if "CUDA device" in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests need a CUDA device and were skipped")


@pytest.fixture(autouse=True)
def seeded_and_single_threaded():
    """A test sees neither the random state nor the thread count of the one before it. One thread,
    since most calls are tiny; test_determinism.py shows that the count changes no bit."""
    torch.manual_seed(20200226)
    torch.set_num_threads(1)
    yield


@pytest.fixture
def poisoned_memory():
    """Fills every freshly allocated tensor with NaN, so that an element nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium on this machine: the page is not opened in a browser")
    opened = Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()
