"""Attention on a GPU in a process of its own, where backward is the first thing its thread ever
does there. Skipped where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Forward and backward twice: the second time everything is warm, and must change no bit. On Hopper
# the kernels are those of the dispatch table, not the general ones.
PROGRAM = """
import os
import sys

import torch
from support import load_libraries

load_libraries()
kind = sys.argv[1]
block = {"long": 256, "pair of tiles": 128}.get(kind, 64)
window = 1 if kind in ("window", "walk") else 0
length = 4 * block
gen = torch.Generator("cuda").manual_seed(1)
def draw(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=gen, device="cuda", dtype=dtype)
query, key, value = (draw(2, 2, length, 64).requires_grad_() for _ in range(3))
grad = draw(2, 2, length, 64)
sort = torch.softmax(draw(2, 2, 4, 4, dtype=torch.float32), -1)
if kind != "sortcut":
    sort = sort.tril(-1 - window)
sort.requires_grad_()
leaves = [query, key, value] + ([] if kind == "window" else [sort])
torch.cuda.synchronize()

def gradients():
    if kind == "sortcut":
        out = torch.ops.sinkhorn.sortcut(query, key, value, sort, block, 1)
    else:
        out = torch.ops.sinkhorn.attention(
            query, key, value, None if kind == "window" else sort, block, "strict", window=window)
    return torch.autograd.grad(out, leaves, grad)

first, second = gradients(), gradients()
for name, a, b in zip(("query", "key", "value", "sort"), first, second):
    assert torch.isfinite(a).all(), name
    assert torch.equal(a, b), name + ": the first backward differs from the second"
portable = "SINKHORN_CUDA_PORTABLE" in os.environ
if torch.cuda.get_device_capability() == (9, 0) and not portable:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        gradients()
        torch.cuda.synchronize()
    wanted = "attention_bwd_" + {"long": "long", "window": "walk", "walk": "walk",
                                 "sortcut": "cut"}.get(kind, "pair")
    names = [event.key for event in profiler.key_averages()]
    assert any(wanted in name for name in names), f"no {wanted} among {names}"
print("equal")
"""


@pytest.mark.parametrize("kind", ["tile", "pair of tiles", "long", "window", "walk", "sortcut"])
def test_a_thread_that_begins_with_backward_takes_the_same_kernels_as_later(kind: str) -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM, kind],
                           cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0 and found.stdout.strip() == "equal", found.stderr[-2000:]
