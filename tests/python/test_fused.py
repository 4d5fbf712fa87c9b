"""The training step's operators, on the CPU and, where there is one, on a GPU; their gradients against
finite differences; and what they refuse."""

from __future__ import annotations

import pytest
import torch

import fused_checks
from marks import needs_cuda, on_devices
from support import randn

ops = torch.ops.sinkhorn


@on_devices
@pytest.mark.parametrize("check", fused_checks.CHECKS, ids=lambda c: c.__name__)
def test_fused(check, device, poisoned_memory):
    check(device)


@needs_cuda
@pytest.mark.parametrize("check", fused_checks.GRAPHS, ids=lambda c: c.__name__)
def test_a_captured_graph_begins_anew(check):
    check("cuda")


@on_devices
def test_gradients_match_finite_differences(device):
    x, part, weight, bias = (randn(*s, seed=i, device=device).requires_grad_()
                             for i, s in enumerate([(2, 3, 6), (2, 3, 6), (6,), (6,)]))
    wide = torch.float64
    assert torch.autograd.gradcheck(
        lambda *t: ops.add_norm(*t, 1e-6, 0.0, wide), (x, part, weight, bias))
    assert torch.autograd.gradcheck(lambda *t: ops.norm(*t, 1e-6, wide), (x, weight, bias))
    assert torch.autograd.gradcheck(
        lambda *t: ops.carry_norm(*t, 1e-6, wide), (x, weight, bias))
    assert torch.autograd.gradcheck(lambda *t: ops.residual(*t, 0.0), (x, part))
    matrix, shift = randn(4, 6, seed=7, device=device), randn(4, seed=8, device=device)
    for relu in (False, True):
        assert torch.autograd.gradcheck(
            lambda *t: ops.linear(*t, relu=relu),
            (x, matrix.requires_grad_(), shift.requires_grad_()))
    assert torch.autograd.gradcheck(
        lambda t: ops.embed(t, torch.tensor([[0, 3, 0], [1, 3, 3]], device=device), x[0].detach(), 2.5),
        (matrix,))
    targets = torch.tensor([0, 5, 2, 0, 1, 3], device=device)
    for smoothing in (0.0, 0.2):
        assert torch.autograd.gradcheck(
            lambda t: ops.cross_entropy(t.flatten(0, 1), targets, 0, smoothing), (x,))
        assert torch.autograd.gradcheck(
            lambda t, m: ops.label_loss(t.flatten(0, 1), m, targets % 4, 0, smoothing), (x, matrix))


@on_devices
def test_nonsense_is_refused(device):
    def floats(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=device)

    one = floats(8)
    refused = [
        (r"part must be", lambda: ops.add_norm(floats(2, 8), floats(2, 7), one, one, 1e-6, 0.0,
                                               torch.float32)),
        (r"weight must be", lambda: ops.norm(floats(2, 8), floats(7), one, 1e-6, torch.float32)),
        (r"weight must have the type of x",
         lambda: ops.norm(floats(2, 8), one.double(), one, 1e-6, torch.float32)),
        (r"dropout_p", lambda: ops.residual(floats(2, 8), floats(2, 8), 1.0)),
        (r"width 8", lambda: ops.linear(floats(2, 8), floats(3, 7))),
        (r"targets must be int64",
         lambda: ops.cross_entropy(floats(2, 8), floats(2).int(), 0)),
        (r"targets must be", lambda: ops.cross_entropy(floats(2, 8), floats(3).long(), 0)),
        (r"ids must be int64",
         lambda: ops.embed(floats(9, 8), floats(2, 3).int(), floats(3, 8), 1.0)),
        (r"positions must be",
         lambda: ops.embed(floats(9, 8), floats(2, 3).long(), floats(2, 8), 1.0)),
        (r"label_loss: x has width 8",
         lambda: ops.label_loss(floats(2, 8), floats(3, 7), floats(2).long(), 0)),
        (r"label_loss: targets must be",
         lambda: ops.label_loss(floats(2, 8), floats(3, 8), floats(3).long(), 0)),
        (r"smoothing", lambda: ops.cross_entropy(floats(2, 8), floats(2).long(), 0, 1.5)),
    ]
    for message, call in refused:
        with pytest.raises(ValueError, match=message):
            call()


def test_shapes_without_values():
    x = torch.empty(4, 5, 32, device="meta")
    part = torch.empty(4, 5, 32, device="meta", dtype=torch.bfloat16)
    weight = torch.empty(32, device="meta")
    total, y, mean, rstd, rng = ops.add_norm_fwd(x, part, weight, weight, 1e-6, 0.1, torch.bfloat16)
    assert total.shape == y.shape == x.shape and mean.shape == rstd.shape == (4, 5)
    assert (total.dtype, y.dtype, rng.shape) == (torch.float32, torch.bfloat16, (2,))
    found = ops.add_norm_bwd(total, y, total, weight, mean, rstd, rng, 0.1, torch.bfloat16)
    assert [tuple(g.shape) for g in found] == [(4, 5, 32), (4, 5, 32), (32,), (32,)]
    loss, grad = ops.cross_entropy_fwd(part.flatten(0, 1), torch.empty(20, device="meta").long(), 0,
                                       0.1, True)
    assert loss.shape == () and grad.shape == (20, 32) and grad.dtype == torch.bfloat16
    labels = torch.empty(259, 32, device="meta", dtype=torch.bfloat16)
    loss, grad, grad_x = ops.label_loss_fwd(part.flatten(0, 1), labels,
                                            torch.empty(20, device="meta").long(), 0, 0.1)
    assert loss.shape == () and grad.shape == (20, 264) and grad_x.shape == (20, 32)
