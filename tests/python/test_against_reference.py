"""Outputs and all gradients against the reference: to rounding in float64, and in the other types
no worse than plain eager code of the same type by the factors of docs/numerics.md.

A ratio of two errors needs enough of them: cheap cases are drawn three times, and tensors of a few
numbers (`sort` of one block) again and again with other seeds. It also says nothing where eager is exact by luck, so a floor of a few 1e-8
of the call's largest tensor is added. Cases marked degenerate have a softmax over one or two keys,
whose gradient is 0 on paper and in eager code; their floor is a few float32 roundings or, in half
types, the one rounding that SPEC section 2 grants to R and the sorted blocks.
"""

from __future__ import annotations

import pytest
import torch

import cases
from cases import Attention, Balance, Pool, Sortcut
from support import HALF_TYPES, arithmetic_type, assert_near, call, cast, devices, rms, rms_error
from support import present, randn, value_and_grads

FLOAT64_TOLERANCE = 1e-11
FLOOR, DEGENERATE_FLOOR = 3e-8, 5e-7
ENOUGH_NUMBERS = 100
FACTORS = {  # output, gradients
    torch.float32: (1.5, 2.0),
    torch.bfloat16: (2.0, 3.0),
    torch.float16: (2.0, 3.0),
}

on_devices = pytest.mark.parametrize("device", devices())


def errors_and_scale(case, inputs, dtype: torch.dtype) -> dict[str, tuple[float, float, float]]:
    """Mean squares by name: our error, eager's error, and the truth."""
    shape = call("sinkhorn", case, inputs).shape
    grad_output = randn(*shape, seed=909, dtype=torch.float32 if case.op == "balance" else dtype)
    truth = value_and_grads("sinkhorn_reference", case, cast(inputs, torch.float64), grad_output)
    eager = value_and_grads("sinkhorn_reference", case, cast(inputs, dtype), grad_output)
    torch.set_num_threads(2)  # the reference has no use for a second thread, the operators do
    ours = value_and_grads("sinkhorn", case, inputs, grad_output)
    torch.set_num_threads(1)
    return {name: (rms_error(ours[name], x) ** 2, rms_error(eager[name], x) ** 2, rms(x) ** 2)
            for name, x in truth.items()}


def half_rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2 if dtype in HALF_TYPES else 0.0


def assert_as_good_as_eager(case, dtype: torch.dtype, device: str, **more) -> None:
    draws = []
    numbers = 0
    cheap = cases.cost(case) < 8_000_000
    least, most = (3, 25) if cheap else (1, 8)
    while len(draws) < least or (numbers < ENOUGH_NUMBERS and len(draws) < most):
        inputs = case.inputs(dtype, device, seed=100 * len(draws), **more)
        numbers += min(inputs[name].numel() for name in present(case, inputs))
        draws.append(errors_and_scale(case, inputs, dtype))
    pooled = {name: [(sum(draw[name][k] for draw in draws) / len(draws)) ** 0.5 for k in range(3)]
              for name in draws[0]}
    floor = max(DEGENERATE_FLOOR, half_rounding(dtype)) if case.degenerate else FLOOR
    floor *= max(size for _, _, size in pooled.values())
    for name, (error, eager_error, _) in pooled.items():
        bound = FACTORS[dtype][name != "output"] * eager_error + floor
        assert error <= bound, (
            f"{name}: RMS error {error:.3g}, eager {dtype} {eager_error:.3g}, allowed {bound:.3g}")


@on_devices
@pytest.mark.parametrize("case", cases.params(cases.VALUES))
def test_float64_equals_the_reference_to_rounding(case, device):
    inputs = case.inputs(torch.float64, device)
    assert_near(value_and_grads("sinkhorn", case, inputs),
                value_and_grads("sinkhorn_reference", case, inputs),
                FLOAT64_TOLERANCE, "float64 against the reference")


@pytest.mark.parametrize("case", cases.params(cases.VALUES))
def test_float32_error_is_at_most_1_5x_that_of_eager_float32_and_gradients_2x(case):
    assert_as_good_as_eager(case, torch.float32, "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("case", cases.params(cases.VALUES))
def test_float32_on_cuda_is_right_to_1e_5(case):
    """There the operators are themselves eager code, on matrix products; the reference sums pairwise
    and is the more exact of the two, so the ratio above waits for CUDA kernels."""
    inputs = case.inputs(torch.float32, "cuda")
    by_name = errors_and_scale(case, inputs, torch.float32)
    largest = max(size for _, _, size in by_name.values()) ** 0.5
    for name, (error, _, _) in by_name.items():
        assert error**0.5 <= 1e-5 * largest, f"{name}: RMS error {error**0.5:.3g} of {largest:.3g}"


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


def _swapped(x):  # the layout [B, L, H, D] that linear maps produce, seen as [B, H, L, D]
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() > 2 else x.t().contiguous().t()


def _strided(x):  # every second element of a wider tensor, the rest poisoned
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), 1, dtype=x.dtype, device=x.device)
    if x.is_floating_point():
        wide.fill_(float("nan"))
    view = wide[..., 1::2]
    view.copy_(x)
    return view


def _expanded(x):  # one batch row seen by all, stride 0
    return x[:1].expand_as(x)


LAYOUTS = {"swapped": _swapped, "strided": _strided, "expanded": _expanded}
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
