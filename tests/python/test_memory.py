"""Peak extra memory of forward + backward, measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SLACK = 6 << 20  # scratch of the threads, small tensors, pages of code first touched
OPTIONS = dict(length=4096, heads=8, width=64, iterations=5)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="cannot reset VmHWM")
@pytest.mark.parametrize("block", [64, 16])
@pytest.mark.parametrize("causal, columns", [
    ("none", "full"), ("strict", "prefix"), ("strict", "prior"), ("inclusive", "prefix")])
def test_peak_extra_memory_is_tokens_sorted_copies_gradients_and_four_n_by_n(
        causal, columns, block):
    """q, k, v, sorted k and v, and the gradients of these five, each of q's size, plus four N x N
    matrices for each head. The inputs and the incoming gradient are there before, uncounted."""
    options = OPTIONS | dict(causal=causal, columns=columns, block=block)
    # Large blocks straight from the system, so that freed memory does not stay resident.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, HERE / "memory_probe.py", json.dumps(options)], env=env,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    extra = json.loads(done.stdout)["extra"]
    length, heads, width = options["length"], options["heads"], options["width"]
    tokens = 4 * heads * length * width
    matrices = 4 * heads * (length // block) ** 2
    bound = 10 * tokens + 4 * matrices + SLACK
    assert extra >= 3 * tokens, f"{extra} bytes cannot hold the three gradients: measured wrongly"
    assert extra <= bound, f"{extra / 2**20:.1f} MiB extra, allowed {bound / 2**20:.1f} MiB"
