"""Gradients against finite differences in float64, for every legal combination of options."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

import cases
import literal
from cases import Attention, Balance, Pool, Sortcut
from support import call, present, randn, value_and_grads

ONE_EACH = [
    Pool("recent", True, "holes"),
    Balance("none", "full", 3),
    Balance("strict", "prefix", 3),
    Balance("inclusive", "prior", 3),
    Attention("none", "concat", 1, "holes"),
    Attention("inclusive", "logits"),
    Attention("strict", "outputs"),
    Attention("strict", window=1, sorted=False),
    Sortcut(2, "right"),
]


@pytest.mark.parametrize("case", cases.GRADCHECK, ids=str)
def test_gradient_matches_finite_differences(case):
    inputs = case.inputs(torch.float64)
    names = present(case, inputs)

    def function(*tensors):
        return call("sinkhorn", case, inputs | dict(zip(names, tensors)))

    leaves = [inputs[name].clone().requires_grad_() for name in names]
    assert gradcheck(function, leaves, eps=1e-6, atol=1e-7, rtol=1e-5, fast_mode=False)


@pytest.mark.parametrize("case", ONE_EACH, ids=str)
def test_second_derivative_throws_even_when_the_loss_also_reads_the_inputs(case):
    """Were backward's result a constant to autograd, or an error that hangs off leaves of its own
    (as once_differentiable makes it, and autograd.grad then never visits), the sum of squares would
    hide that and give a wrong number in silence."""
    inputs = case.inputs(torch.float64)
    names = present(case, inputs)
    leaves = {name: inputs[name].clone().requires_grad_() for name in names}
    output = call("sinkhorn", case, inputs | leaves)
    with pytest.raises((RuntimeError, NotImplementedError)):
        grads = torch.autograd.grad(output.pow(2).sum(), list(leaves.values()), create_graph=True)
        loss = sum((g * x).sum() + x.pow(2).sum() for g, x in zip(grads, leaves.values()))
        torch.autograd.grad(loss, list(leaves.values()))


@pytest.mark.parametrize("case", ONE_EACH, ids=str)
def test_second_derivative_through_the_incoming_gradient_throws(case):
    inputs = case.inputs(torch.float64)
    names = present(case, inputs)
    leaves = {name: inputs[name].clone().requires_grad_() for name in names}
    output = call("sinkhorn", case, inputs | leaves)
    incoming = torch.ones_like(output).requires_grad_()
    with pytest.raises((RuntimeError, NotImplementedError)):
        grads = torch.autograd.grad(output, list(leaves.values()), incoming, create_graph=True)
        loss = sum(g.pow(2).sum() for g in grads) + incoming.pow(2).sum()
        torch.autograd.grad(loss, incoming)


@pytest.mark.parametrize("case", ONE_EACH, ids=str)
def test_gradient_of_one_input_alone_equals_its_gradient_among_all(case):
    inputs = case.inputs(torch.float64)
    together = value_and_grads("sinkhorn", case, inputs)
    grad_output = randn(*together["output"].shape, seed=909)
    for name in present(case, inputs):
        leaf = inputs[name].clone().requires_grad_()
        output = call("sinkhorn", case, inputs | {name: leaf})
        (alone,) = torch.autograd.grad(output, leaf, grad_output)
        torch.testing.assert_close(alone, together[f"gradient of {name}"], rtol=1e-12, atol=1e-14,
                                   msg=f"{name} alone")


def _right_derivative(function, sort: torch.Tensor, at: tuple[int, ...], step: float = 1e-4):
    """From the right only: `sort` is non-negative, and this entry is 0. Error O(step^3)."""
    values = []
    for k in range(4):
        moved = sort.clone()
        moved[at] += k * step
        values.append(function(moved))
    f0, f1, f2, f3 = values
    return (-11 * f0 + 18 * f1 - 9 * f2 + 2 * f3) / (6 * step)


@pytest.mark.parametrize("op, more", [
    ("attention", {"combine": "concat"}), ("attention", {"combine": "logits"}),
    ("attention", {"combine": "outputs"}), ("sortcut", {"budget": 1})], ids=str)
def test_gradient_flows_into_sort_through_a_weight_of_zero(op, more):
    """Offset 2 is real in block 1 only, and destination 0 gives block 1 nothing: the weight there
    is 0, but moving sort[0, 1] off 0 brings the position into the softmax."""
    query, key, value = (randn(1, 1, 6, 2, seed=s) for s in (1, 2, 3))
    mask = torch.tensor([[True, True, False, True, True, True]])
    sort = torch.tensor([[[[0.9, 0.0], [0.4, 0.7]]]], dtype=torch.float64)
    weights = randn(1, 1, 6, 2, seed=4)
    options = {"block": 3, "mask": mask} | more

    def loss(s):
        return (getattr(literal, op)(query, key, value, s, **options) * weights).sum().item()

    leaf = sort.clone().requires_grad_()
    output = getattr(torch.ops.sinkhorn, op)(query, key, value, leaf, **options)
    (grad,) = torch.autograd.grad(output, leaf, weights)
    expected = _right_derivative(loss, sort, (0, 0, 0, 1))
    assert abs(expected) > 1e-2, "the case must exercise the weight"
    assert grad[0, 0, 0, 1].item() == pytest.approx(expected, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("case", [c for c in ONE_EACH if c.op == "balance"], ids=str)
def test_noise_gets_no_gradient(case):
    inputs = case.inputs(torch.float64)
    noise = randn(*inputs["logits"].shape, seed=5).requires_grad_()
    logits = inputs["logits"].clone().requires_grad_()
    call("sinkhorn", case, inputs | {"logits": logits, "noise": noise}).pow(2).sum().backward()
    assert noise.grad is None
    assert logits.grad.abs().sum() > 0
