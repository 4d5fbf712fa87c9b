"""Outputs and all gradients against the reference: to rounding in float64, and in the other types
no worse than plain eager code of the same type by the factors of docs/numerics.md (comparison.py).
gpu_cases.py runs more of the list on a GPU."""

from __future__ import annotations

import pytest
import torch

import cases
from cases import Attention, Balance, Pool, Sortcut
from comparison import assert_as_good_as_eager, lean_balance
from marks import on_devices
from support import HALF_TYPES, LAYOUTS, arithmetic_type, assert_near, call, randn, value_and_grads

FLOAT64_TOLERANCE = 1e-11


@on_devices
@pytest.mark.parametrize("case", cases.params(cases.VALUES))
def test_float64_equals_the_reference_to_rounding(case, device):
    inputs = case.inputs(torch.float64, device)
    assert_near(value_and_grads("sinkhorn", case, inputs),
                value_and_grads("sinkhorn_reference", case, inputs),
                FLOAT64_TOLERANCE, "float64 against the reference")


@on_devices
@pytest.mark.parametrize("case", cases.params(cases.VALUES))
def test_float32_error_is_at_most_1_5x_that_of_eager_float32_and_gradients_2x(case, device):
    """On a GPU 2x and 3x, as in half types."""
    assert_as_good_as_eager(case, torch.float32, device)


@pytest.mark.parametrize("case", [
    *(case for case in cases.GRADCHECK[::3] if case.op == "balance"), *cases.BALANCE_VALUES[::4]],
    ids=str)
def test_the_lean_balance_that_checks_many_blocks_equals_the_reference(case):
    inputs = case.inputs(torch.float64)
    torch.testing.assert_close(lean_balance(**inputs, **case.options()),
                               call("sinkhorn_reference", case, inputs), rtol=1e-11, atol=1e-13)


@on_devices
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("case", cases.params(cases.VALUES[::3]))
def test_half_error_is_at_most_2x_that_of_eager_half_and_gradients_3x(case, dtype, device):
    assert_as_good_as_eager(case, dtype, device)


HALF_SORT = [
    Attention("none", "concat", 0, "right", B=2, H=2, L=200, block=16, D=64),
    Attention("strict", "outputs", 1, "none", B=2, H=2, L=200, block=16, D=17),
    Attention("inclusive", "logits", 0, "holes", B=2, H=2, L=200, block=16, D=64),
    Sortcut(2, "right", B=2, H=2, Lq=64, L=200, block=16, D=64),
]


@on_devices
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("case", cases.params(HALF_SORT, form_every=1))
def test_a_half_sort_beside_half_tokens_meets_the_same_bound(case, dtype, device):
    assert_as_good_as_eager(case, dtype, device, sort_dtype=dtype)


TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@on_devices
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", [
    Pool("mean", False, "holes"), Balance("strict", "prior", 2, noise=True),
    Attention("strict", "concat", 0, "holes"), Sortcut(2, "right")], ids=str)
def test_output_and_gradients_have_the_documented_types(case, dtype, device):
    sort_types = [None]
    if case.op in ("attention", "sortcut"):
        sort_types = [arithmetic_type(dtype), dtype]
    for sort_dtype in sort_types:
        more = {} if sort_dtype is None else {"sort_dtype": sort_dtype}
        inputs = case.inputs(dtype, device, **more)
        result = value_and_grads("sinkhorn", case, inputs)
        expected = arithmetic_type(dtype) if case.op == "balance" else dtype
        assert result.pop("output").dtype == expected
        for name, grad in result.items():
            source = inputs[name.removeprefix("gradient of ")]
            assert (grad.dtype, grad.shape) == (source.dtype, source.shape), name


# Strides -----------------------------------------------------------------------------------------

LAYOUT_CASES = [
    Pool("mean", False, "holes", B=3, L=50, block=8, E=17),
    Pool("recent", True, "right", B=3, L=50, block=8, E=64),
    Balance("none", "full", 3, noise=True, masked=True, N=17),
    Balance("strict", "prior", 3, noise=True, masked=True, N=17),
    Balance("inclusive", "prefix", 3, noise=True, masked=True, N=17),
    Attention("none", "concat", 1, "holes", B=3, L=50, block=8, D=17),
    Attention("inclusive", "logits", 0, "right", B=3, L=50, block=8, D=64),
    Attention("strict", "outputs", 0, "holes", B=3, L=50, block=8, D=64),
    Attention("strict", window=1, mask="right", sorted=False, B=3, L=50, block=8, D=64),
    Sortcut(3, "right", B=3, Lq=20, L=50, block=8, D=64),
]


@on_devices
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", cases.params(LAYOUT_CASES))
def test_any_strides_give_the_result_of_contiguous_inputs(case, layout, dtype, device):
    inputs = case.inputs(dtype, device)
    odd = {name: None if x is None else LAYOUTS[layout](x) for name, x in inputs.items()}
    plain = {name: None if x is None else x.contiguous() for name, x in odd.items()}
    assert any(x is not None and not x.is_contiguous() for x in odd.values())
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    assert_near(value_and_grads("sinkhorn", case, odd), value_and_grads("sinkhorn", case, plain),
                tolerance, f"{layout} inputs")


@on_devices
@pytest.mark.parametrize("layout", ["swapped", "strided", "all strides 0"])
@pytest.mark.parametrize("case", cases.params(LAYOUT_CASES))
def test_any_strides_of_the_incoming_gradient_give_the_same_gradients(case, layout, device):
    inputs = case.inputs(torch.float64, device)
    shape = call("sinkhorn", case, inputs).shape
    if layout == "all strides 0":  # what .sum().backward() sends
        odd = torch.ones((), dtype=torch.float64, device=device).expand(shape)
    else:
        odd = LAYOUTS[layout](randn(*shape, seed=6, device=device))
    assert_near(value_and_grads("sinkhorn", case, inputs, odd),
                value_and_grads("sinkhorn", case, inputs, odd.contiguous()), 1e-12, layout)


@on_devices
@pytest.mark.parametrize("case", LAYOUT_CASES, ids=str)
def test_an_empty_batch_gives_an_empty_result_and_empty_gradients(case, device):
    inputs = {name: None if x is None else x[:0] for name, x in
              case.inputs(torch.float32, device).items()}
    expected = list(call("sinkhorn", case, case.inputs(torch.float32, device)).shape)
    result = value_and_grads("sinkhorn", case, inputs)
    assert list(result["output"].shape) == [0, *expected[1:]]
    assert all(x.numel() == 0 for x in result.values())
