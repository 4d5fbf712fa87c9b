"""Same inputs, same bits, every time and for any thread count; and what dropout draws."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from cases import Attention, Balance, Pool, Sortcut
from marks import on_devices
from support import assert_same_bits, call, present, randn, value_and_grads

ops = torch.ops.sinkhorn

SIZES = dict(B=2, H=3, L=500, block=32, D=64)
CASES = [
    Pool("mean", False, "holes", L=1000, block=32, E=64),
    Pool("sum", True, "right", L=1000, block=32, E=64),
    Pool("recent", True, "right", L=1000, block=32, E=64),
    Balance("none", "full", 5, noise=True, masked=True, H=3, N=65),
    Balance("strict", "prefix", 5, noise=True, masked=True, H=3, N=65),
    Balance("inclusive", "prior", 5, noise=True, masked=True, H=3, N=65),
    Balance("none", "full", 5, B=1, H=1, N=300),
    Balance("strict", "prior", 5, B=1, H=1, N=300),
    Attention("none", "concat", 1, "right", **SIZES),
    Attention("none", "logits", 0, "holes", **SIZES),
    Attention("strict", "concat", 2, "none", **SIZES),
    Attention("inclusive", "outputs", 0, "right", **SIZES),
    Attention("strict", window=1, sorted=False, **SIZES),
    Attention("none", B=1, H=1, L=1000, block=16, D=64),
    Sortcut(2, "right", B=2, H=3, Lq=300, L=500, block=32, D=64),
    Sortcut(2, B=1, H=1, Lq=1000, L=1000, block=64, D=64),
]
DROPPED = [case for case in CASES if case.op in ("attention", "sortcut")]


@pytest.mark.each_form
@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_repeat_runs_and_any_thread_count_give_the_same_bits(case, dtype, device):
    inputs = case.inputs(dtype, device)
    torch.set_num_threads(1)
    expected = value_and_grads("sinkhorn", case, inputs)
    for threads in (1, 2, 2, 3):
        torch.set_num_threads(threads)
        assert_same_bits(value_and_grads("sinkhorn", case, inputs), expected, f"{threads} threads")


# Dropout -----------------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", DROPPED, ids=str)
def test_dropout_with_one_seed_gives_the_same_bits_for_any_thread_count(case, dtype, device):
    inputs = case.inputs(dtype, device)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        torch.manual_seed(7)
        results.append(value_and_grads("sinkhorn", case, inputs, dropout_p=0.3))
    for result in results[1:]:
        assert_same_bits(result, results[0], "same seed, other thread count")


@on_devices
@pytest.mark.parametrize("case", DROPPED, ids=str)
def test_dropout_draws_anew_for_each_call_and_seed_from_the_default_generator(case, device):
    inputs = case.inputs(torch.float32, device)
    rng = torch.cuda if device == "cuda" else torch

    def run():
        return call("sinkhorn", case, inputs, dropout_p=0.3)

    torch.manual_seed(7)
    first, state = run(), rng.get_rng_state()
    second = run()
    assert not torch.equal(first, second), "consecutive calls must differ"
    torch.manual_seed(8)
    assert not torch.equal(first, run()), "another seed must differ"
    rng.set_rng_state(state)
    assert torch.equal(second, run()), "the state of the default generator decides the draw"
    torch.manual_seed(7)
    assert torch.equal(first, run()), "the same seed must repeat"


TINY_DROPPED = [
    Attention("none", "concat", 1, "holes"),
    Attention("none", "logits"),
    Attention("strict", "outputs"),
    Attention("inclusive", "concat", mask="right"),
    Attention("strict", window=1, sorted=False),
    Sortcut(2, "right"),
]


@pytest.mark.parametrize("case", TINY_DROPPED, ids=str)
def test_gradient_of_dropout_matches_finite_differences_of_the_same_draw(case):
    inputs = case.inputs(torch.float64)
    names = present(case, inputs)

    def function(*tensors):
        torch.manual_seed(11)
        return call("sinkhorn", case, inputs | dict(zip(names, tensors)), dropout_p=0.4)

    leaves = [inputs[name].clone().requires_grad_() for name in names]
    kept = call("sinkhorn", case, inputs)
    assert not torch.allclose(function(*leaves), kept), "something must be dropped"
    assert gradcheck(function, leaves, eps=1e-6, atol=1e-7, rtol=1e-5, fast_mode=False)


@on_devices
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_preserves_the_mean(p, device):
    """With values of 1 an output is the sum of its weights: 1 on average."""
    shape = (4, 4, 512, 8)
    q, k = (randn(*shape, seed=s, dtype=torch.float32, device=device) for s in (1, 2))
    sort = randn(4, 4, 16, 16, seed=3, dtype=torch.float32, device=device).softmax(-1)
    for name, out, expected in (
        ("concat", ops.attention(q, k, torch.ones_like(q), sort, 32, dropout_p=p), 1),
        ("logits", ops.attention(q, k, torch.ones_like(q), sort, 32, combine="logits",
                                 dropout_p=p), 1),
        ("outputs", ops.attention(q, k, torch.ones_like(q), sort, 32, combine="outputs",
                                  dropout_p=p), 2),
        ("local", ops.attention(q, k, torch.ones_like(q), None, 32, dropout_p=p), 1),
        ("sortcut", ops.sortcut(q, k, torch.ones_like(q), sort, 32, 2, dropout_p=p), 1),
    ):
        sums = out[..., 0].double()
        error = sums.std().item() / sums.numel() ** 0.5
        assert sums.std() > 0.01, name
        assert sums.mean().item() == pytest.approx(expected, abs=5 * error), name
        assert torch.equal(out[..., 0], out[..., -1]), "a weight is dropped for its whole value"


def kept_share_bounds(p: float, count: int) -> float:
    return 5 * (p * (1 - p) / count) ** 0.5


@on_devices
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("op", ["attention", "sortcut"])
def test_share_dropped_is_p_and_the_rest_is_scaled_by_1_over_1_minus_p(op, p, device):
    """Blocks of 1: a single weight of 1 for each query, so an output is 0 or 1 / (1 - p)."""
    x = torch.ones(2, 4, 4096 if op == "attention" else 1, 1, device=device)
    if op == "attention":
        out = ops.attention(x, x, x, None, 1, dropout_p=p)
    else:
        queries = torch.ones(2, 4, 4096, 1, device=device)
        out = ops.sortcut(queries, x, x, torch.ones(2, 4, 1, 1, device=device), 1, 1, dropout_p=p)
    out = out[..., 0]
    kept = out != 0
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / (1 - p)))
    for b in range(2):
        for h in range(4):
            dropped = 1 - kept[b, h].double().mean().item()
            assert dropped == pytest.approx(p, abs=kept_share_bounds(p, 4096)), (b, h)
    same = p * p + (1 - p) ** 2  # agreement of two independent rows
    rows = kept.flatten(0, 1)
    for r in range(1, 8):
        agree = (rows[0] == rows[r]).double().mean().item()
        assert agree == pytest.approx(same, abs=kept_share_bounds(same, 4096)), f"heads 0 and {r}"
    neighbours = (rows[:, 1:] == rows[:, :-1]).double().mean().item()
    assert neighbours == pytest.approx(same, abs=kept_share_bounds(same, 8 * 4095))


@on_devices
@pytest.mark.parametrize("combine", ["concat", "outputs"])
def test_sorted_and_local_weights_are_dropped_independently(combine, device):
    """Blocks of 1 and the identity: two weights for each query. Were one draw used for both, an
    output would never be half of the full one. In `outputs` each softmax draws its own."""
    p, count = 0.5, 4096
    x = torch.ones(8, 8, 64, 1, device=device)
    sort = torch.eye(64, device=device).expand(8, 8, 64, 64)
    full = 1.0 if combine == "concat" else 2.0
    out = ops.attention(x, x, x, sort, 1, combine=combine, dropout_p=p).flatten() / full
    for value, share in ((0.0, 0.25), (1.0, 0.5), (2.0, 0.25)):
        seen = ((out - value).abs() < 1e-5).double().mean().item()
        assert seen == pytest.approx(share, abs=kept_share_bounds(share, count)), value


def test_dropout_of_zero_is_no_dropout_and_masked_queries_stay_zero():
    case = Attention("none", "concat", 1, "holes", L=50, block=8, D=16)
    inputs = case.inputs(torch.float32)
    assert torch.equal(call("sinkhorn", case, inputs, dropout_p=0.0),
                       call("sinkhorn", case, inputs))
    dropped = call("sinkhorn", case, inputs, dropout_p=0.5)
    pads = ~inputs["mask"][:, None].expand(2, 2, 50)
    assert (dropped[pads] == 0).all() and (dropped[~pads] != 0).any()
