"""The checks of gpu_cases.py. Each takes a case, a type and a device and yields what is wrong with
it, one line a fault; nothing for a case that passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import cases
import comparison
from support import LAYOUTS, Inputs, allowed, assert_near, call, live_blocks, most_shared, present
from support import randn, value_and_grads

TOKENS = {"pool": ("x",), "attention": ("query", "key", "value"), "sortcut": ("key", "value")}
NAN = float("nan")


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every freshly allocated tensor is filled with NaN, so that an element nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def enough(case: Any) -> Any:
    """The case with more batch rows, where it is tiny: more numbers for the ratio of two errors."""
    rows = getattr(case, "H", 1) * getattr(case, "L", getattr(case, "N", 1) ** 2)
    wide = replace(case, B=max(case.B, min(32, 2000 // rows)))
    return wide if cases.cost(wide) <= 2_000_000 else case


def poison_unread(case: Any, inputs: Inputs, grad_output: Tensor) -> tuple[Inputs, Tensor]:
    """NaN in everything that may not be read: masked tokens, sort and logits outside allowed, the
    incoming gradient of masked queries."""
    dirty, grad = dict(inputs), grad_output
    if case.op == "balance":
        live = inputs["block_mask"]
        if live is None:
            live = torch.ones(case.B, case.N, dtype=torch.bool, device=grad.device)
        outside = ~allowed(live, case.causal, case.window)[:, None].expand_as(grad)
        for name in ("logits", "noise"):
            if inputs[name] is not None:
                dirty[name] = inputs[name].masked_fill(outside, NAN)
        return dirty, grad.masked_fill(outside, NAN)
    mask = inputs["mask"]
    if mask is not None:
        pads = ~mask[..., None] if case.op == "pool" else ~mask[:, None, :, None]
        for name in TOKENS[case.op]:
            dirty[name] = inputs[name].masked_fill(pads, NAN)
        if case.op == "attention":
            grad = grad.masked_fill(pads, NAN)
    if inputs.get("sort") is not None:
        if mask is None:
            mask = torch.ones(case.B, case.L, dtype=torch.bool, device=grad.device)
        causal, window = getattr(case, "causal", "none"), getattr(case, "window", 0)
        outside = ~allowed(live_blocks(mask, case.block), causal, window)[:, None]
        dirty["sort"] = inputs["sort"].masked_fill(outside, NAN)
    return dirty, grad


def different(actual: dict[str, Tensor], expected: dict[str, Tensor], why: str) -> Iterator[str]:
    for name, x in expected.items():
        if torch.equal(actual[name], x):
            continue
        off = (actual[name] != x) | actual[name].isnan()
        yield (f"{name}: {why}: {int(off.sum())} of {x.numel()} numbers differ, the first at "
               f"{off.nonzero()[0].tolist()}, {int(actual[name].isnan().sum())} of them NaN")


def has_kernels(case: Any, dtype: torch.dtype) -> bool:
    """Whether kernels, not Torch's operations, are to compute attention or sortcut: backward in
    parts holds six tiles of 64 rows, the sort of many blocks its own."""
    number, most = (4, 128) if dtype == torch.float32 else (2, 256)
    tile = next((w for w in (32, 64, 128, 256) if -(-case.D // 8) * 8 <= w <= most), None)
    if tile is None:
        return False
    needed = 6 * 64 * (tile + (4 if number == 4 else 8)) * number + 4096
    if getattr(case, "sorted", True) and -(-case.L // min(case.block, case.L)) > 64:
        needed = max(needed, 80 * 1024)
    return needed <= most_shared()


def ran_kernels(case: Any, inputs: Inputs) -> bool:
    """Torch's operations leave the statistics of the softmax at 0, kernels never do."""
    forward = getattr(torch.ops.sinkhorn, f"{case.op}_fwd")
    return bool(forward(**inputs, **case.options(), dropout_p=0.0)[1].any())


def values(case: Any, dtype: torch.dtype, device: str, worst: dict[str, tuple[float, str]],
           **more: Any) -> Iterator[str]:
    """The ratio of errors; finite; the same bits again with fresh memory poisoned and NaN in all
    that may not be read. `worst` collects the largest shares of a bound, by kind of tensor."""
    case = enough(case)
    draws: list[comparison.Errors] = []
    numbers = 0
    while not draws or (numbers < comparison.ENOUGH_NUMBERS and len(draws) < 12):
        inputs = case.inputs(dtype, device, seed=100 * len(draws), **more)
        grad_output = comparison.output_gradient(case, inputs, dtype)
        ours = value_and_grads("sinkhorn", case, inputs, grad_output)
        for name, x in ours.items():
            if not torch.isfinite(x).all():
                yield f"{name}: {int((~torch.isfinite(x)).sum())} of {x.numel()} not finite"
                return
        if not draws:
            if device == "cuda" and case.op in ("attention", "sortcut") and (
                    ran_kernels(case, inputs) != has_kernels(case, dtype)):
                yield "not computed by the code that should"
            dirty, dirty_grad = poison_unread(case, inputs, grad_output)
            with poisoned_memory():
                again = value_and_grads("sinkhorn", case, dirty, dirty_grad)
            faults = list(different(again, ours, "NaN in fresh memory and in what may not be read"))
            if faults:
                yield from different(value_and_grads("sinkhorn", case, inputs, grad_output), ours,
                                     "a plain repeat")
                yield from faults
        numbers += comparison.least_numbers(case, inputs)
        draws.append(comparison.mean_squares(case, inputs, ours, grad_output, dtype))
    for verdict in comparison.judge(case, dtype, device, draws):
        kind = "output" if verdict.name == "output" else "gradient"
        if verdict.share > worst.get(kind, (0.0, ""))[0]:
            worst[kind] = verdict.share, verdict.name
        if not verdict.share <= 1:
            yield str(verdict)


def strides(case: Any, dtype: torch.dtype, device: str) -> Iterator[str]:
    """Inputs and incoming gradients of other strides give what contiguous ones give."""
    inputs = case.inputs(dtype, device)
    grad_output = comparison.output_gradient(case, inputs, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    for layout, change in LAYOUTS.items():
        odd = {name: None if x is None else change(x) for name, x in inputs.items()}
        plain = {name: None if x is None else x.contiguous() for name, x in odd.items()}
        odd_grad = change(grad_output)
        actual = value_and_grads("sinkhorn", case, odd, odd_grad)
        expected = value_and_grads("sinkhorn", case, plain, odd_grad.contiguous())
        try:
            assert_near(actual, expected, tolerance, f"{layout} inputs and gradient")
        except AssertionError as fault:
            yield str(fault)


def float64_values(case: Any, device: str) -> Iterator[str]:
    inputs = case.inputs(torch.float64, device)
    grad_output = comparison.output_gradient(case, inputs, torch.float64)
    truth = comparison.reference(case, inputs, grad_output)
    ours = value_and_grads("sinkhorn", case, inputs, grad_output)
    scale = max(x.pow(2).mean().sqrt().item() for x in truth.values())
    for name, x in truth.items():
        error = (ours[name] - x).pow(2).mean().sqrt().item()
        if not error <= 1e-10 * scale:
            yield f"{name}: RMS error {error:.3g} beside {scale:.3g}"


def heads_apart(case: Any, dtype: torch.dtype, device: str) -> Iterator[str]:
    """A head of NaN or inf, its sort and gradient too, leaves every bit of the other heads."""
    heads = range(case.B * case.H)
    inputs = case.inputs(dtype, device)
    grad = comparison.output_gradient(case, inputs, dtype)
    clean = value_and_grads("sinkhorn", case, inputs, grad)
    for value, at in ((NAN, len(heads) // 2), (float("inf"), 0)):
        dirty = {name: inputs[name].clone() for name in present(case, inputs)}
        dirty_grad = grad.clone()
        for x in (*dirty.values(), dirty_grad):
            x.view(-1, *x.shape[2:])[at] = value
        spoiled = value_and_grads("sinkhorn", case, inputs | dirty, dirty_grad)
        others = [head for head in heads if head != at]
        yield from different(*({name: x.flatten(0, 1)[others] for name, x in results.items()}
                               for results in (spoiled, clean)),
                             f"{value} in head {at} of {len(heads)}")


def blocks_apart(case: Any, dtype: torch.dtype, device: str) -> Iterator[str]:
    """NaN in the incoming gradient of one block, under a causal rule and with blocks that share no
    tile: it reaches the values that the block reads through the sort, its own row of the gradient
    of the sort, and neither the tokens behind it nor another row."""
    inputs = case.inputs(dtype, device)
    grad = comparison.output_gradient(case, inputs, dtype)
    clean = value_and_grads("sinkhorn", case, inputs, grad)
    blocks = case.L // case.block
    for i in sorted({blocks // 2, blocks - 2}):
        begin, end = i * case.block, (i + 1) * case.block
        broken = grad.clone()
        broken[:, :, begin:end] = NAN
        found = value_and_grads("sinkhorn", case, inputs, broken)
        for name in ("query", "key", "value"):
            parts = (x[f"gradient of {name}"][:, :, end:] for x in (found, clean))
            yield from _near(*parts, f"gradient of {name} behind a broken block {i}", dtype)
        others = [row for row in range(blocks) if row != i]
        parts = (x["gradient of sort"][:, :, others] for x in (found, clean))
        yield from _near(*parts, f"gradient of sort beside a broken row {i}", dtype)
        sources = max(0, i - case.window) if case.causal == "strict" else i + 1
        if not found["gradient of value"][:, :, : sources * case.block].isnan().all():
            yield f"gradient of value: a broken block {i} did not reach its sources"


def _near(actual: Tensor, expected: Tensor, what: str, dtype: torch.dtype) -> Iterator[str]:
    share = comparison.FLOAT_BOUND if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    off = ~((actual - expected).abs() <= share * expected.abs().max())  # true for NaN
    if off.any():
        yield f"{what}: {int(off.sum())} of {off.numel()} numbers changed"


# Causality ---------------------------------------------------------------------------------------


def new_future(x: Tensor, t: int, dim: int, seed: int, value: float | None = None) -> Tensor:
    changed = x.clone()
    later = changed.narrow(dim, t + 1, x.shape[dim] - t - 1)
    if value is not None:
        later.fill_(value)
    else:
        new = 2 * randn(*later.shape, seed=seed, device=str(x.device))
        later.copy_(new > 0 if x.dtype == torch.bool else new.abs() if dim == 2 and
                    x.shape[-1] == x.shape[-2] else new)
    return changed


def _causal_call(case: Any, inputs: Inputs, t: int, value: float | None) -> Tensor:
    """The outputs with everything after t (token or, for balance, row) changed."""
    changed = dict(inputs)
    if case.op == "balance":
        rows = new_future(inputs["logits"], t, 2, t, value)
        changed["logits"] = new_future(rows, t, 3, t + 50, value)
        if inputs["block_mask"] is not None and value is None:
            changed["block_mask"] = new_future(inputs["block_mask"], t, 1, t)
        return call("sinkhorn", case, changed)
    for k, name in enumerate(TOKENS[case.op]):
        changed[name] = new_future(inputs[name], t, 1 if case.op == "pool" else 2, t + k, value)
    if inputs.get("sort") is not None:
        changed["sort"] = new_future(inputs["sort"], t // case.block, 2, t, value)
    if inputs["mask"] is not None and value is None:
        changed["mask"] = new_future(inputs["mask"], t, 1, t + 9)
    return call("sinkhorn", case, changed)


def causality(case: Any, dtype: torch.dtype, device: str) -> Iterator[str]:
    """Other tokens, mask bits and rows of `sort` after t leave every bit of outputs 0..t; NaN after
    the end of a block leaves what lies before, to rounding: kernels add such rows up again."""
    inputs = case.inputs(dtype, device, **({"outside": 0.0} if case.op == "attention" else {}))
    before = call("sinkhorn", case, inputs)
    size, block = (case.N, 1) if case.op == "balance" else (case.L, case.block)
    for t in sorted({0, block - 1, block, size // 3, size // 2, size - 2}):
        if not 0 <= t < size - 1:
            continue
        end = -(-(t + 1) // block) * block - 1  # of t's block
        for at, value, why in ((t, None, "numbers"), (end, NAN, "NaN")):
            if at >= size - 1 or (value is not None and case.op == "balance"):
                continue
            if case.op == "pool":
                at = at // block * block  # row i of the result reads up to token i * block
                kept = at // block + 1
                parts = before[:, :kept], _causal_call(case, inputs, at, value)[:, :kept]
            else:
                parts = tuple(x[:, :, : at + 1] for x in
                              (before, _causal_call(case, inputs, at, value)))
            if value is not None:
                share = 4 * torch.finfo(dtype).eps if dtype != torch.float32 else (
                    comparison.FLOAT_BOUND)
                slack = share * parts[0].abs().max()
                same = (parts[0] - parts[1]).abs() <= slack  # false for NaN
            else:
                same = parts[0] == parts[1]
            if not same.all():
                count = int((~same).sum())
                yield f"{why} after {at} of {size} changed {count} outputs"


# Dropout -----------------------------------------------------------------------------------------


def _dropped(case: Any, inputs: Inputs, grad: Tensor, seed: int, p: float) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return value_and_grads("sinkhorn", case, inputs, grad, dropout_p=p)


def _slope(case: Any, inputs: Inputs, grad: Tensor, p: float, name: str) -> str | None:
    """The gradient against a finite difference of the same draw, along a random direction."""
    result = _dropped(case, inputs, grad, 11, p)[f"gradient of {name}"].double()
    way = randn(*inputs[name].shape, seed=77, dtype=torch.float32, device=str(grad.device))
    if name == "sort":
        way = way * (inputs[name] > 0.01) * inputs[name]
    sums, step = [], 2e-3
    for sign in (1, -1):
        torch.manual_seed(11)
        moved = inputs | {name: inputs[name] + sign * step * way}
        sums.append((call("sinkhorn", case, moved, dropout_p=p).double() * grad).sum().item())
    expected, actual = (sums[0] - sums[1]) / (2 * step), (result * way).sum().item()
    size = (result * way).norm().item() + 1e-6
    if not abs(actual - expected) <= 0.05 * size:
        return f"gradient of {name}: {actual:.5g} along a line, differences give {expected:.5g}"
    return None


def dropout(case: Any, dtype: torch.dtype, device: str) -> Iterator[str]:
    p = 0.3
    sort = {} if not getattr(case, "sorted", True) else {"outside": 0.0}
    inputs = case.inputs(dtype, device, **sort)
    grad = comparison.output_gradient(case, inputs, dtype)
    first = _dropped(case, inputs, grad, 7, p)
    yield from different(_dropped(case, inputs, grad, 7, p), first, "the same seed again")
    if torch.equal(first["output"], _dropped(case, inputs, grad, 8, p)["output"]):
        yield "output: another seed gives the same result"
    # The output is linear in the values: <dO, O> = <dV, V>.
    products = (first["output"].double() * grad.double(),
                first["gradient of value"].double() * inputs["value"].double())
    size = sum(x.norm().item() for x in products)
    gap = abs(products[0].sum().item() - products[1].sum().item())
    limit = 8 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-4
    if not gap <= limit * size:
        yield f"gradient of value: <dO, O> - <dV, V> = {gap:.3g}, allowed {limit * size:.3g}"
    if dtype == torch.float32:
        for name in present(case, inputs):
            fault = _slope(case, inputs, grad, p, name)
            if fault:
                yield fault
    ones = inputs | {"value": torch.ones_like(inputs["value"])}
    full = call("sinkhorn", case, ones)[..., 0].double()
    sums = []
    for seed in range(4):
        torch.manual_seed(seed)
        sums.append(call("sinkhorn", case, ones, dropout_p=p)[..., 0].double() - full)
    off = torch.stack(sums)
    error = off.std().item() / off.numel() ** 0.5
    rounding = torch.finfo(dtype).eps / 4
    if not abs(off.mean().item()) <= 5 * error + rounding:
        yield f"output: weights sum to {off.mean().item():.4g} +- {error:.2g} too much on average"


# What is saved between forward and backward ------------------------------------------------------


def saved(case: Any, dtype: torch.dtype, device: str) -> Iterator[str]:
    """Backward overwrites nothing: a second one through the same graph gives the same bits, and
    the inputs, the output and the incoming gradient are what they were."""
    inputs = case.inputs(dtype, device)
    grad = comparison.output_gradient(case, inputs, dtype)
    leaves = {name: inputs[name].detach().clone().requires_grad_()
              for name in present(case, inputs)}
    output = call("sinkhorn", case, inputs | leaves)
    grad = grad.to(output.dtype)
    before = {name: x.detach().clone() for name, x in leaves.items()}
    before |= {"the output": output.detach().clone(), "the incoming gradient": grad.clone()}
    first, second = (dict(zip(leaves, torch.autograd.grad(output, list(leaves.values()), grad,
                                                          retain_graph=True))) for _ in range(2))
    yield from different(second, first, "backward again")
    after = leaves | {"the output": output.detach(), "the incoming gradient": grad}
    yield from different({name: x.detach() for name, x in after.items()}, before, "after backward")


# CUDA graphs -------------------------------------------------------------------------------------


def graph(case: Any, dtype: torch.dtype, device: str) -> Iterator[str]:
    """Captured and replayed, forward and backward: the bits of eager; with dropout a new draw each
    time."""
    inputs = case.inputs(dtype, device)
    grad = comparison.output_gradient(case, inputs, dtype)
    eager = value_and_grads("sinkhorn", case, inputs, grad)
    for more in ({}, {"dropout_p": 0.3}) if case.op in ("attention", "sortcut") else ({},):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            value_and_grads("sinkhorn", case, inputs, grad, **more)
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            results = value_and_grads("sinkhorn", case, inputs, grad, **more)
        replays = []
        for _ in range(2):
            for x in results.values():
                x.fill_(NAN)
            captured.replay()
            replays.append({name: x.clone() for name, x in results.items()})
        if not more:
            yield from different(replays[0], eager, "replayed")
            yield from different(replays[1], eager, "replayed again")
        elif torch.equal(replays[0]["output"], replays[1]["output"]):
            yield "output: two replays draw the same dropout"
        elif not all(torch.isfinite(x).all() for x in replays[1].values()):
            yield "not finite when replayed with dropout"
