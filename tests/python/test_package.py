"""The Python package: the four functions, by position and by keyword, are the operators."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest
import torch

import sinkhorn
from cases import Attention, Balance, Pool, Sortcut
from support import REPO, assert_same_bits, randn, value_and_grads

NAMES = ("pool", "balance", "attention", "sortcut")
CASES = [
    Pool("recent", True, "holes"),
    Balance("strict", "prior", 3, 1, noise=True, masked=True),
    Attention("none", "outputs", 1, "holes", scale=0.3),
    Attention("strict", window=2, sorted=False),
    Sortcut(2, "right", scale=0.3),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_function_by_keyword_equals_the_operator_with_its_gradients(case):
    inputs = case.inputs(torch.float64)
    expected = value_and_grads("sinkhorn", case, inputs)
    leaves = {name: inputs[name].clone().requires_grad_()
              for name in case.grads if inputs[name] is not None}
    output = getattr(sinkhorn, case.op)(**(inputs | leaves), **case.options())
    grads = torch.autograd.grad(output, list(leaves.values()), randn(*output.shape, seed=909))
    actual = {"output": output.detach()} | {
        f"gradient of {name}": grad for name, grad in zip(leaves, grads)}
    assert_same_bits(actual, expected, "sinkhorn and torch.ops.sinkhorn differ")


@pytest.mark.parametrize("name", NAMES)
def test_function_has_the_names_order_and_defaults_of_the_schema_and_says_what_it_does(name):
    function = getattr(sinkhorn, name)
    schema = getattr(torch.ops.sinkhorn, name).default._schema
    parameters = inspect.signature(function).parameters
    assert list(parameters) == [argument.name for argument in schema.arguments]
    for argument in schema.arguments:
        default = parameters[argument.name].default
        if argument.has_default_value():
            assert default == argument.default_value, argument.name
        assert parameters[argument.name].annotation is not inspect.Parameter.empty, argument.name
    assert inspect.getdoc(function)


def test_function_by_position_equals_the_operator():
    x = torch.randn(2, 7, 4)
    assert torch.equal(sinkhorn.pool(x, 3, "mean", True),
                       torch.ops.sinkhorn.pool(x, 3, "mean", True))
    logits = torch.randn(2, 2, 3, 3)
    sort = sinkhorn.balance(logits, 5, 0.75)
    assert torch.equal(sort, torch.ops.sinkhorn.balance(logits, 5, 0.75))
    q, k, v = (torch.randn(2, 2, 7, 4) for _ in range(3))
    assert torch.equal(sinkhorn.attention(q, k, v, sort, 3),
                       torch.ops.sinkhorn.attention(q, k, v, sort, 3))
    assert torch.equal(sinkhorn.sortcut(q, k, v, sort, 3, 2),
                       torch.ops.sinkhorn.sortcut(q, k, v, sort, 3, 2))


def test_dropout_is_passed_on():
    q, k, v = (torch.randn(2, 2, 7, 4) for _ in range(3))
    torch.manual_seed(3)
    dropped = sinkhorn.attention(q, k, v, None, 3, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(dropped, torch.ops.sinkhorn.attention(q, k, v, None, 3, dropout_p=0.5))
    assert not torch.equal(dropped, sinkhorn.attention(q, k, v, None, 3))


def test_import_alone_finds_and_loads_the_library(tmp_path):
    code = ("import torch, sinkhorn; "
            "print(tuple(sinkhorn.pool(torch.ones(1, 7, 2), 3, 'sum', False).shape))")
    path = os.pathsep.join(filter(None, [str(REPO / "python"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=120,
                          capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(1, 3, 2)"
