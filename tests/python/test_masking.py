"""What is masked or not allowed is selected away: NaN and inf there change no output and no
gradient, and gradients there are exactly 0. NaN in a real token reaches all that read it."""

from __future__ import annotations

import pytest
import torch

import cases
from cases import Attention, Balance, Pool, Sortcut
from marks import on_devices
from support import MASK_KINDS, allowed, allowed_for, assert_same_bits, call, live_blocks
from support import num_blocks, randn, value_and_grads

ops = torch.ops.sinkhorn
pytestmark = pytest.mark.each_form
on_types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
POISONS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
on_poisons = pytest.mark.parametrize("poison", POISONS)
on_poisons_and_types = pytest.mark.parametrize(
    "poison, dtype", [("nan", torch.float32), ("inf", torch.float32), ("-inf", torch.float32),
                      ("nan", torch.bfloat16), ("nan", torch.float64)])

MASKED = [kind for kind in MASK_KINDS if kind != "none"]
SHAPE = dict(L=26, block=8, D=17)
POOLS = [Pool(mode, causal, mask, L=26, block=8, E=17)
         for mode, causal in cases.POOL_MODES for mask in ("holes", "row")]
ATTENTIONS = [Attention(causal, combine, window, mask, **SHAPE)
              for causal, combine, window in cases.ATTENTION_RULES if window < 2
              for mask in ("holes", "block")]
ATTENTIONS += [Attention("strict", "concat", 1, mask, **SHAPE) for mask in ("right", "row")]
ATTENTIONS += [Attention(causal, "concat", 1, "holes", sorted=False, **SHAPE)
               for causal in ("none", "strict")]
ATTENTIONS += [Attention("none", "concat", 0, "holes", L=100, block=64, D=64)]
SORTCUTS = [Sortcut(budget, mask, Lq=9, **SHAPE) for budget in (1, 3) for mask in MASKED]


def outside_allowed(case, mask: torch.Tensor) -> torch.Tensor:
    causal, window = getattr(case, "causal", "none"), getattr(case, "window", 0)
    return ~allowed(live_blocks(mask, case.block), causal, window)


SORTED = [case for case in ATTENTIONS + SORTCUTS if getattr(case, "sorted", True)
          and outside_allowed(case, case.inputs(torch.float32)["mask"]).any()]
TOKEN_CASES = [*POOLS, *ATTENTIONS, *SORTCUTS]


TOKEN_INPUTS = {  # those that `mask` describes
    "pool": ["x"], "attention": ["query", "key", "value"], "sortcut": ["key", "value"]}


def token_inputs(case) -> list[str]:
    return TOKEN_INPUTS[case.op]


def masked_tokens(case, inputs, name: str) -> torch.Tensor:
    """The mask of pads, shaped to fit the input."""
    pads = ~inputs["mask"]
    pads = pads[..., None] if case.op == "pool" else pads[:, None, :, None]
    return pads.expand_as(inputs[name])


@on_devices
@on_poisons_and_types
@pytest.mark.parametrize("case", TOKEN_CASES, ids=str)
def test_poison_in_masked_tokens_changes_no_bit_of_outputs_and_gradients(
        case, poison, dtype, device):
    inputs = case.inputs(dtype, device)
    clean, poisoned = dict(inputs), dict(inputs)
    for name in token_inputs(case):
        pads = masked_tokens(case, inputs, name)
        clean[name] = inputs[name].masked_fill(pads, 0.0)
        poisoned[name] = inputs[name].masked_fill(pads, POISONS[poison])
    expected = value_and_grads("sinkhorn", case, clean)
    actual = value_and_grads("sinkhorn", case, poisoned)
    assert all(torch.isfinite(x).all() for x in expected.values())
    assert_same_bits(actual, expected, f"{poison} in masked tokens")
    for name in token_inputs(case):
        grad = actual[f"gradient of {name}"][masked_tokens(case, inputs, name)]
        assert (grad == 0).all(), f"gradient of masked {name}"


@on_devices
@pytest.mark.parametrize("case", ATTENTIONS, ids=str)
def test_masked_queries_give_zero_and_their_incoming_gradient_is_not_read(case, device):
    inputs = case.inputs(torch.float32, device)
    pads = masked_tokens(case, inputs, "query")
    grad_output = randn(*pads.shape, seed=5, dtype=torch.float32, device=device)
    clean = value_and_grads("sinkhorn", case, inputs, grad_output.masked_fill(pads, 0.0))
    for value in (float("nan"), 1e30):
        dirty = value_and_grads("sinkhorn", case, inputs, grad_output.masked_fill(pads, value))
        assert_same_bits(dirty, clean, f"{value} in the gradient of masked outputs")
    assert (clean["output"][pads] == 0).all()
    real = clean["output"][~pads]
    assert (real != 0).float().mean() > 0.9, "real queries read something"


@on_devices
@on_poisons
@pytest.mark.parametrize("case", SORTED, ids=str)
def test_sort_outside_allowed_is_never_read_and_gets_zero_gradient(case, poison, device):
    inputs = case.inputs(torch.float32, device, outside=0.0)
    dirty = case.inputs(torch.float32, device, outside=POISONS[poison])
    expected = value_and_grads("sinkhorn", case, inputs)
    actual = value_and_grads("sinkhorn", case, dirty)
    assert_same_bits(actual, expected, f"{poison} in sort outside allowed")
    grad = actual["gradient of sort"]
    outside = outside_allowed(case, inputs["mask"])[:, None].expand_as(grad)
    assert (grad[outside] == 0).all()
    if case.op == "sortcut":
        assert (grad[:, :, case.budget:] == 0).all(), "destinations past the budget are not read"


BALANCES = [Balance(causal, columns, iterations, window, True, True, N=11)
            for causal, columns, window in cases.BALANCE_RULES for iterations in (0, 1, 4)]


@on_devices
@on_poisons_and_types
@pytest.mark.parametrize("case", BALANCES, ids=str)
def test_logits_and_noise_outside_allowed_are_never_read_and_get_zero_gradient(
        case, poison, dtype, device):
    inputs = case.inputs(dtype, device)
    where = allowed(inputs["block_mask"], case.causal, case.window)[:, None]
    outside = ~where.expand_as(inputs["logits"])
    dirty = dict(inputs)
    for name in ("logits", "noise"):
        dirty[name] = inputs[name].masked_fill(outside, POISONS[poison])
    grad_output = randn(*outside.shape, seed=5, device=device)
    expected = value_and_grads("sinkhorn", case, inputs, grad_output.masked_fill(outside, 0.0))
    actual = value_and_grads("sinkhorn", case, dirty,
                             grad_output.masked_fill(outside, POISONS[poison]))
    assert all(torch.isfinite(x).all() for x in expected.values())
    assert_same_bits(actual, expected, f"{poison} outside allowed")
    assert (actual["output"][outside] == 0).all()
    assert (actual["gradient of logits"][outside] == 0).all()


@on_devices
@pytest.mark.parametrize("case", [
    Pool("mean", False, "row"), Pool("sum", True, "row"),
    *(Attention(causal, combine, window, "row", L=10)
      for causal, combine, window in cases.ATTENTION_RULES),
    Attention("strict", "concat", 1, "row", sorted=False), Sortcut(2, "row")], ids=str)
def test_a_fully_masked_batch_row_gives_zeros_and_zero_gradients(case, device):
    result = value_and_grads("sinkhorn", case, case.inputs(torch.float32, device))
    for name, x in result.items():
        assert (x[0] == 0).all(), name
        if name == "output":
            assert (x[1:] != 0).any(), "the other rows are not masked"


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", cases.GRADCHECK[::3], ids=str)
def test_every_element_of_outputs_and_gradients_is_written(case, dtype, device, poisoned_memory):
    assert torch.empty(4, device=device).isnan().all(), "the fixture must poison fresh memory"
    for name, x in value_and_grads("sinkhorn", case, case.inputs(dtype, device)).items():
        assert torch.isfinite(x).all(), name


# NaN in a real token -----------------------------------------------------------------------------


def reads(case, mask: torch.Tensor | None, token: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, L] of queries: those that read the token's key, and those whose block sees its block.

    Outside the second set nothing may be NaN; between the two lie queries of a block that sees the
    token's block, but not yet this token.
    """
    if mask is None:
        mask = torch.ones(case.B, case.L, dtype=torch.bool)
    block, index = case.block, torch.arange(case.L)
    j, p = divmod(token, block)
    at, offset = index // block, index % block
    near = ((at - j).abs() <= case.window).expand_as(mask)
    far = torch.zeros_like(mask)
    if case.sorted:
        far = allowed_for(mask, case.B, case.L, block, case.causal, case.window)[:, at, j]
    if case.combine == "logits":  # the local term only adds to visible sorted positions
        near = near & far
    may = (near if case.causal == "none" else near & (at >= j)) | far
    local = near if case.causal == "none" else near & (index >= token)
    routed = far & (offset >= p) if case.causal == "inclusive" else far
    return (local | routed) & mask, may & mask


@on_devices
@on_types
@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("case", [
    Attention(causal, combine, window, "none", **SHAPE)
    for causal, combine, window in cases.ATTENTION_RULES]
    + [Attention(causal, "concat", window, "none", sorted=False, **SHAPE)
       for causal in ("none", "strict") for window in (0, 1)]
    + [Attention("strict", "concat", 0, "block", **SHAPE)]
    + [Attention(causal, "concat", 0, "none", B=2, H=2, L=512, block=256, D=64)
       for causal in ("none", "strict", "inclusive")], ids=str)
def test_nan_in_a_real_token_reaches_what_reads_it_and_no_block_that_does_not(
        case, name, dtype, device):
    inputs = case.inputs(dtype, device)
    mask = None if inputs["mask"] is None else inputs["mask"].cpu()
    for token in sorted({0, 5, 7, 17, 25, 3 * case.L // 4, case.L - 1}):
        if mask is not None and not mask[1, token]:
            continue
        poisoned = inputs[name].clone()
        poisoned[1, 0, token, 3] = float("nan")
        nan = call("sinkhorn", case, inputs | {name: poisoned}).isnan().cpu()
        assert not nan[0].any() and not nan[1, 1].any(), "another batch row or head"
        seen = nan[1, 0].any(-1)
        if name == "query":
            must = may = torch.arange(case.L) == token
        else:
            must, may = (x[1] for x in reads(case, mask, token))
            if name == "value" and case.combine == "logits" and case.sorted:  # only V' is averaged
                far = allowed_for(mask, case.B, case.L, case.block, case.causal)[1]
                at, offset = torch.arange(case.L) // case.block, torch.arange(case.L) % case.block
                must = may = far[at, token // case.block]
                if case.causal == "inclusive":
                    must = must & (offset >= token % case.block)
        assert (seen | ~must).all(), f"token {token}: not reached {(must & ~seen).nonzero()}"
        assert (may | ~seen).all(), f"token {token}: wrongly reached {(seen & ~may).nonzero()}"


@on_devices
@on_types
def test_nan_in_a_real_key_or_value_reaches_every_query_of_sortcut(dtype, device):
    case = Sortcut(2, "right", Lq=9, **SHAPE)
    inputs = case.inputs(dtype, device)
    for name in ("key", "value"):
        poisoned = inputs[name].clone()
        poisoned[1, 0, 11] = float("nan")
        nan = call("sinkhorn", case, inputs | {name: poisoned}).isnan()
        assert nan[1, 0].all() and not nan[0].any() and not nan[1, 1].any(), name
    poisoned = inputs["query"].clone()
    poisoned[1, 0, 4, 2] = float("nan")
    nan = call("sinkhorn", case, inputs | {"query": poisoned}).isnan()
    assert nan[1, 0, 4].all() and nan.any(-1).sum() == 1


@on_devices
@on_types
@pytest.mark.parametrize("poison", ["nan", "inf"])
@pytest.mark.parametrize("mode, causal", cases.POOL_MODES)
def test_nan_or_inf_in_a_real_token_reaches_exactly_the_pooled_rows_that_read_it(
        mode, causal, poison, dtype, device):
    """`recent` must forget the token again: a difference of running sums would not."""
    length, block = 26, 4
    for token in (0, 1, 4, 5, 13, 25):
        x = randn(2, length, 5, seed=1, dtype=dtype, device=device)
        x[1, token, 2] = POISONS[poison]
        out = ops.pool(x, block, mode, causal).cpu()
        first = torch.arange(num_blocks(length, block)) * block
        expected = token // block * block == first
        if causal:
            expected = (token <= first) & ((mode != "recent") | (token > first - block))
        assert torch.equal(~torch.isfinite(out[1, :, 2]), expected), f"token {token}"
        assert torch.isfinite(out[0]).all() and torch.isfinite(out[1, :, [0, 1, 3, 4]]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("case", [
    *(Attention("none", combine, **SHAPE) for combine in ("concat", "logits", "outputs")),
    Attention("strict", "concat", 1, **SHAPE), Attention("inclusive", **SHAPE),
    Sortcut(1, Lq=9, **SHAPE)], ids=str)
def test_a_mask_that_masks_nothing_changes_nothing(case, dtype):
    """Nor does it where rows of the sort are zeros, whatever stands in what they do not sort."""
    inputs = case.inputs(dtype)
    inputs["sort"][:, :, ::2] = 0
    inputs["value"][:, :, 3] = float("nan")
    masked = inputs | {"mask": torch.ones(case.B, case.L, dtype=torch.bool)}
    plain = call("sinkhorn", case, inputs)
    assert torch.equal(plain.isnan(), call("sinkhorn", case, masked).isnan())
    assert not plain.isnan().all()
    inputs["value"][:, :, 3] = masked["value"][:, :, 3] = 1.0
    assert torch.equal(call("sinkhorn", case, inputs), call("sinkhorn", case, masked))
