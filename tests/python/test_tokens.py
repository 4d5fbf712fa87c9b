"""What a layer does with the gradients of its tokens, on the CPU and, where there is one, on a GPU."""

from __future__ import annotations

import pytest
import torch

import token_checks
from marks import on_devices

ops = torch.ops.sinkhorn


@on_devices
@pytest.mark.parametrize("check", token_checks.CHECKS, ids=lambda c: c.__name__)
def test_tokens(check, device, poisoned_memory):
    check(device)


@on_devices
def test_nonsense_is_refused(device):
    onto, grad = torch.zeros(2, 9, 8, device=device), torch.zeros(2, 3, 8, device=device)
    refused = [
        (r"one or two gradients", lambda: ops.pool_spread(onto, [], None, 4, [], [])),
        (r"a mode and a causal", lambda: ops.pool_spread(onto, [grad], None, 4, ["sum"], [])),
        (r"grads must be", lambda: ops.pool_spread(onto, [grad], None, 2, ["sum"], [False])),
        (r"type of onto",
         lambda: ops.pool_spread(onto, [grad.half()], None, 4, ["sum"], [False])),
        (r"recent", lambda: ops.pool_spread(onto, [grad], None, 4, ["recent"], [False])),
    ]
    for message, call in refused:
        with pytest.raises(ValueError, match=message):
            call()


def test_shapes_without_values():
    onto, grad = torch.empty(2, 9, 8, device="meta"), torch.empty(2, 3, 8, device="meta")
    assert ops.pool_spread(onto, [grad, grad], None, 4, ["mean"] * 2, [True, False]).shape == (2, 9, 8)
