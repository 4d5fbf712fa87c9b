"""Checks of label_loss, for any device: the loss of a projection to many labels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import support
from fused_values import Values, compare
from support import randn

ops = torch.ops.sinkhorn
TYPES = (torch.float32, torch.bfloat16, torch.float16)
IGNORED = 0
SIZES = [(1, 8, 3), (7, 16, 259), (130, 24, 8), (300, 128, 2051), (40, 64, 32000)]  # rows, in, labels
LARGE = [(5000, 128, 8000), (1300, 264, 32003)]  # on a GPU


def _inputs(size: tuple[int, int, int], dtype: torch.dtype, device: str) -> tuple[Values, Tensor]:
    rows, width, labels = size
    tensors = {"x": randn(rows, width, seed=1, dtype=dtype, device=device),
               "weight": randn(labels, width, seed=2, dtype=torch.float32, device=device) / width**0.5}
    targets = torch.randint(0, labels, (rows,), generator=support.generator(rows))
    targets[1::3] = IGNORED
    targets[0] = labels - 1
    return tensors, targets.to(device)


def _values(function, inputs: Values, factor: float) -> Values:
    leaves = {k: t.detach().requires_grad_() for k, t in inputs.items()}
    loss = function(**leaves)
    grads = torch.autograd.grad(loss * factor, list(leaves.values()))
    return {"loss": loss.detach()} | {f"gradient of {k}": g for k, g in zip(leaves, grads)}


def _eager(dtype: torch.dtype, targets: Tensor, smoothing: float):
    def function(x: Tensor, weight: Tensor) -> Tensor:
        logits = x @ weight.to(dtype).T
        return F.cross_entropy(logits if dtype == torch.float64 else logits.float(), targets,
                               ignore_index=IGNORED, label_smoothing=smoothing)
    return function


def label_losses(device: str) -> None:
    for size in SIZES + (LARGE if device == "cuda" else []):
        for dtype in TYPES if size in SIZES else TYPES[1:2]:
            inputs, targets = _inputs(size, dtype, device)
            rounded = {k: t.to(dtype).double() for k, t in inputs.items()}  # as the product reads it
            for smoothing, factor in ((0.0, 1.0), (0.1, 1 / 3)):
                def fused(x: Tensor, weight: Tensor) -> Tensor:
                    return ops.label_loss(x, weight, targets, IGNORED, smoothing)

                why = f"label_loss {dtype} {size} {smoothing} {factor}"
                found = _values(fused, inputs, factor)
                truth = _values(_eager(torch.float64, targets, smoothing), rounded, factor)
                theirs = _values(_eager(dtype, targets, smoothing), inputs, factor)
                assert torch.isclose(found["loss"].double(), truth["loss"], rtol=2e-3), why
                assert found["loss"].dtype == torch.float32, why
                del truth["loss"]
                compare(found, theirs, truth, why)
                again = _values(fused, inputs, factor)
                assert all(torch.equal(found[k], again[k]) for k in found), why
                with torch.no_grad():
                    torch.testing.assert_close(fused(**inputs), found["loss"], rtol=1e-5, atol=0)
                unread = targets == IGNORED
                assert found["gradient of x"][unread].count_nonzero() == 0, why


def label_loss_backward_twice(device: str) -> None:
    inputs, targets = _inputs((130, 24, 259), torch.bfloat16, device)
    leaves = [t.requires_grad_() for t in inputs.values()]
    loss = ops.label_loss(*leaves, targets, IGNORED, 0.1) * 0.5
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(kept, first, second))


def label_loss_times_a_large_factor(device: str) -> None:
    """A factor is not rounded to the half type, in which 1e5 would be infinite."""
    inputs, targets = _inputs((300, 128, 2051), torch.float16, device)

    def fused(x: Tensor, weight: Tensor) -> Tensor:
        return ops.label_loss(x, weight, targets, IGNORED, 0.1)

    whole, large = (_values(fused, inputs, factor) for factor in (1.0, 1e5))
    for name in ("gradient of x", "gradient of weight"):
        a, b = whole[name].double(), large[name].double()
        assert abs((a * b).sum() / a.square().sum() / 1e5 - 1) < 0.01, name


def label_loss_has_no_second_derivative(device: str) -> None:
    inputs, targets = _inputs((9, 16, 40), torch.bfloat16, device)
    x = inputs["x"].requires_grad_()
    loss = ops.label_loss(x, inputs["weight"], targets, IGNORED)
    try:
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        torch.autograd.grad(grad.float().sum(), x)
    except RuntimeError:
        return
    assert device == "cpu"  # where it is made of Torch's operations


def label_loss_without_targets(device: str) -> None:
    inputs, targets = _inputs((9, 16, 40), torch.float32, device)
    loss = ops.label_loss(inputs["x"].requires_grad_(), inputs["weight"],
                          torch.full_like(targets, IGNORED), IGNORED)
    assert loss.isnan()


CHECKS = [label_losses, label_loss_backward_twice, label_loss_times_a_large_factor,
          label_loss_has_no_second_derivative, label_loss_without_targets]
