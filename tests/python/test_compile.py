"""opcheck, torch.compile with lengths that vary, torch.export, and Meta tensors."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from cases import Attention, Balance, Pool, Sortcut
from support import arithmetic_type, call, layer, layer_weights, make_mask, present, randn

HEADS, WIDTH, BLOCK = 2, 12, 4
MAX_BLOCKS, MAX_LENGTH = 64, 128  # never all columns, which export would have to tell apart

CHECKED = [
    Pool("mean", False, "holes"),
    Pool("recent", True, "right"),
    Balance("none", "full", 2, noise=True, masked=True),
    Balance("strict", "prefix", 2, 1),
    Balance("inclusive", "prior", 2),
    Attention("none", "concat", 1, "holes"),
    Attention("strict", "outputs"),
    Attention("inclusive", "logits", mask="right"),
    Attention("strict", window=1, sorted=False),
    Sortcut(2, "right"),
]


def arguments(case, **more) -> dict:
    inputs = case.inputs(torch.float32)
    leaves = {name: inputs[name].clone().requires_grad_() for name in present(case, inputs)}
    return inputs | leaves | case.options() | more


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_opcheck_passes(case):
    kwargs = arguments(case)
    op = getattr(torch.ops.sinkhorn, case.op).default
    results = torch.library.opcheck(op, (), kwargs)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


@pytest.mark.parametrize("case", [CHECKED[5], CHECKED[6], CHECKED[9]], ids=str)
def test_opcheck_passes_with_dropout(case):
    """Without the comparison of two runs, which draw differently."""
    op = getattr(torch.ops.sinkhorn, case.op).default
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    results = torch.library.opcheck(op, (), arguments(case, dropout_p=0.3), test_utils=tests)
    assert set(results.values()) == {"SUCCESS"}
    assert torch.Tag.nondeterministic_seeded in op.tags


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_meta_tensors_give_the_shape_and_type_of_the_result(case, dtype):
    inputs = case.inputs(dtype)
    real = call("sinkhorn", case, inputs)
    meta = call("sinkhorn", case, {k: None if x is None else x.to("meta")
                                   for k, x in inputs.items()})
    assert meta.device.type == "meta"
    assert (meta.shape, meta.dtype) == (real.shape, real.dtype)
    assert meta.dtype == (arithmetic_type(dtype) if case.op == "balance" else dtype)


# torch.compile -----------------------------------------------------------------------------------

LENGTHS = (9, 14, 16, 23, 40, 57)  # short and full last blocks, 3 to 15 blocks


def layer_inputs(length: int, masked: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    x = randn(2, length, WIDTH, seed=length, dtype=torch.float32)
    return x, make_mask("right", 2, length, BLOCK) if masked else None


def forward_and_backward(function, x, *rest):
    leaf = x.clone().requires_grad_()
    output = function(leaf, *rest)
    (grad,) = torch.autograd.grad(output.pow(2).sum(), leaf)
    return output.detach(), grad


@pytest.mark.parametrize("causal, columns, combine, masked", [
    ("none", "full", "concat", False), ("none", "full", "concat", True),
    ("strict", "prefix", "concat", False), ("strict", "prior", "outputs", True),
    ("inclusive", "prior", "logits", True)])
def test_compiled_layer_equals_eager_for_all_lengths_without_recompiling(
        causal, columns, combine, masked):
    weights = layer_weights(WIDTH, HEADS, 8, MAX_BLOCKS)

    def function(x, mask):
        return layer(x, mask, weights, HEADS, BLOCK, causal, columns, combine=combine)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for length in LENGTHS:
        x, mask = layer_inputs(length, masked)
        actual = forward_and_backward(compiled, x, mask)
        expected = forward_and_backward(function, x, mask)
        for name, a, e in zip(("output", "gradient"), actual, expected):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6, msg=f"{name}, length {length}")
        assert counter.frame_count == 1, f"recompiled at length {length}"


@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_each_operator_compiles_once_for_all_lengths(case):
    """The tensors come from outside here, `sort` with a size of its own to reconcile with L."""
    # N unlike any other size of the first call, or the compiler takes the two for one.
    sizes = [dict(N=n) for n in (5, 4, 8, 13)] if case.op == "balance" else [
        dict(L=length, block=BLOCK) for length in (9, 14, 16, 23)]
    counter = CompileCounterWithBackend("aot_eager")
    op = getattr(torch.ops.sinkhorn, case.op)
    options = case.options() | ({} if case.op == "balance" else {"block": BLOCK})
    compiled = torch.compile(lambda tensors: op(**tensors, **options), fullgraph=True, dynamic=True,
                             backend=counter)
    first = 0
    for size in sizes:
        resized = type(case)(**{**case.__dict__, **size})
        inputs = resized.inputs(torch.float32)
        names = present(resized, inputs)
        results = []
        for function in (compiled, lambda tensors: op(**tensors, **options)):
            leaves = {name: inputs[name].clone().requires_grad_() for name in names}
            output = function(inputs | leaves)
            results.append([output, *torch.autograd.grad(output.pow(2).sum(), leaves.values())])
        for name, actual, expected in zip(["output", *names], *results):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6,
                                       msg=f"{name}, {size}")
        # The first call may compile twice: temperature is a variable until an operator reads it.
        first = counter.frame_count if size is sizes[0] else first
        assert counter.frame_count == first, f"recompiled at {size}"


def test_inductor_compiles_the_layer():
    weights = layer_weights(WIDTH, HEADS, 8, MAX_BLOCKS)

    def function(x):
        return layer(x, None, weights, HEADS, BLOCK, "strict", "prior", "recent", 1)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="inductor")
    for length in (14, 23):
        x, _ = layer_inputs(length, False)
        for a, e in zip(forward_and_backward(compiled, x), forward_and_backward(function, x)):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)


def test_compiled_dropout_follows_the_seed():
    case = Attention("none", L=40, block=BLOCK, D=8)
    inputs = case.inputs(torch.float32)
    compiled = torch.compile(lambda tensors: call("sinkhorn", case, tensors, dropout_p=0.5),
                             fullgraph=True, backend="aot_eager")
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(compiled(inputs))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


# torch.export ------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self, causal: str, columns: str) -> None:
        super().__init__()
        self.causal, self.columns = causal, columns
        for name, x in layer_weights(WIDTH, HEADS, 8, MAX_BLOCKS).items():
            self.register_buffer(name, x)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return layer(x, mask, dict(sort=self.sort, qkv=self.qkv), HEADS, BLOCK, self.causal,
                     self.columns)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("causal, columns", [("none", "full"), ("strict", "prior")])
def test_export_with_a_dynamic_length_keeps_the_operators_and_equals_eager(causal, columns, strict):
    module = Layer(causal, columns)
    length = torch.export.Dim("length", min=9, max=MAX_LENGTH)
    program = torch.export.export(module, layer_inputs(23, True), strict=strict,
                                  dynamic_shapes=({1: length}, {1: length}))
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    for op in ("pool", "balance", "attention"):
        assert any(name.startswith(f"sinkhorn.{op}") for name in called), f"{op} not in the graph"
    for n in LENGTHS:
        x, mask = layer_inputs(n, True)
        torch.testing.assert_close(program.module()(x, mask), module(x, mask))
