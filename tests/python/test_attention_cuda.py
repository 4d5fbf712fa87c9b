"""Attention on a GPU: in a process of its own, where backward is the first thing its thread ever
does there; and forward with the sort inside. Skipped where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cases import Attention
from support import call, cast, load_libraries, takes_hoppers_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Forward and backward twice: the second time everything is warm, and must change no bit. On Hopper
# the kernels are those of the dispatch table, not the general ones.
PROGRAM = """
import sys

import torch
from support import load_libraries, takes_hoppers_kernels

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
if takes_hoppers_kernels():
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


def forward(case: Attention, inputs: dict[str, Tensor | None], keeps: bool) -> Tensor:
    """With gradients sorted blocks are kept for backward, without they need never be written."""
    with torch.set_grad_enabled(keeps):
        return call("sinkhorn", case, {name: x.requires_grad_(keeps) if x is not None else None
                                       for name, x in inputs.items()}).detach()


@pytest.mark.parametrize("blocks, inside", [(2, True), (3, False), (16, True), (32, True),
                                            (34, False)])
@pytest.mark.parametrize("keeps", [True, False])
def test_few_blocks_are_sorted_inside_attention(blocks: int, inside: bool, keeps: bool) -> None:
    if not takes_hoppers_kernels():
        pytest.skip("needs Hopper's kernels")
    load_libraries()
    case = Attention("strict", "concat", 0, "none", True, 1, 2, blocks * 64, 64, 64)
    inputs = case.inputs(torch.bfloat16, "cuda")
    forward(case, inputs, keeps)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        forward(case, inputs, keeps)
        torch.cuda.synchronize()
    names = [event.key for event in profiler.key_averages()]
    assert any("attention_fwd_sorting" in name for name in names) == inside, names
    assert any("sort_small" in name or "sort_tiny" in name for name in names) != inside, names


@pytest.mark.parametrize("blocks", [4, 8, 16, 32])
@pytest.mark.parametrize("causal, window", [("none", 0), ("inclusive", 0), ("strict", 1)])
def test_kept_or_not_sorted_blocks_give_the_same_bits(blocks: int, causal: str,
                                                      window: int) -> None:
    load_libraries()
    case = Attention(causal, "concat", window, "none", True, 9, 8, blocks * 64, 64, 64)
    inputs = case.inputs(torch.bfloat16, "cuda")
    expected = forward(case, inputs, keeps=True)
    for _ in range(20):
        assert torch.equal(forward(case, inputs, keeps=False), expected)


@pytest.mark.parametrize("blocks", [4, 8, 16, 30])
@pytest.mark.parametrize("keeps", [True, False])
def test_what_is_not_finite_reaches_those_who_read_it_alone(blocks: int, keeps: bool) -> None:
    load_libraries()
    case = Attention("strict", "concat", 0, "none", True, 2, 2, blocks * 64, 64, 64)
    inputs = case.inputs(torch.bfloat16, "cuda")
    at = (blocks // 2) * 64 + 5
    for name, x in (("key", float("nan")), ("value", float("inf"))):
        broken = inputs | {name: inputs[name].detach().clone()}
        broken[name][0, 1, at, 3] = x
        ours = forward(case, broken, keeps).double()
        truth = call("sinkhorn_reference", case, cast(broken, torch.float64)).detach()
        assert torch.equal(torch.isfinite(ours), torch.isfinite(truth)), name
        assert not torch.isfinite(truth).all(), name
        near = torch.isfinite(truth)
        error = (ours - truth)[near].square().mean().sqrt() / truth[near].square().mean().sqrt()
        assert error < 5e-3, f"{name}: {error}"


@pytest.mark.parametrize("keeps", [True, False])
def test_a_head_that_is_not_finite_changes_no_bit_of_the_others(keeps: bool) -> None:
    load_libraries()
    case = Attention("none", "concat", 0, "none", True, 20, 8, 12 * 64, 64, 64)  # several a cluster
    inputs = case.inputs(torch.bfloat16, "cuda")
    expected = forward(case, inputs, keeps)
    for name in ("key", "value"):
        broken = inputs | {name: inputs[name].detach().clone()}
        broken[name][0, :4] = float("nan")
        found = forward(case, broken, keeps)
        assert found[0, :4].isnan().all(), name
        assert torch.equal(found[0, 4:], expected[0, 4:]), name
        assert torch.equal(found[1:], expected[1:]), name
