"""Operators and reference against literal.py, the equations of docs/spec.md written out in plain
Python: a reading of the text that shares nothing with the C++."""

from __future__ import annotations

import pytest
import torch

import cases
import literal
from support import call


@pytest.mark.parametrize("case", cases.GRADCHECK + cases.ZERO_ROWS[::2], ids=str)
def test_operator_and_reference_equal_the_equations_written_out(case):
    inputs = case.inputs(torch.float64)
    expected = getattr(literal, case.op)(**inputs, **case.options())
    for namespace in ("sinkhorn", "sinkhorn_reference"):
        torch.testing.assert_close(
            call(namespace, case, inputs), expected, rtol=1e-11, atol=1e-13,
            msg=lambda text, namespace=namespace: f"{namespace}::{case.op}: {text}")


@pytest.mark.parametrize("op", ["attention", "sortcut"])
def test_zeros_in_sort_are_weights_of_zero_not_missing_positions(op):
    """Hard permutations and rows of nothing, over pads: weights of exactly 0 and of 0 / 0."""
    query, key, value = (torch.randn(2, 2, 10, 2, dtype=torch.float64) for _ in range(3))
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0, 4:6] = False
    mask[1, 8:] = False
    sort = torch.zeros(2, 2, 4, 4, dtype=torch.float64)
    sort[:, 0] = torch.eye(4, dtype=torch.float64)[[2, 0, 3, 1]]
    sort[:, 1, 0, 1] = sort[:, 1, 2, 3] = 0.5  # rows 1 and 3 of this head read nothing
    options = {"block": 3, "mask": mask}
    variants = [{"budget": n} for n in (1, 2, 4)]
    if op == "attention":
        variants = [{"causal": c, "combine": m} for c, m, w in cases.ATTENTION_RULES if w == 0]
    for variant in variants:
        expected = getattr(literal, op)(query, key, value, sort, **options, **variant)
        for namespace in (torch.ops.sinkhorn, torch.ops.sinkhorn_reference):
            actual = getattr(namespace, op)(query, key, value, sort, **options, **variant)
            torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-13)
