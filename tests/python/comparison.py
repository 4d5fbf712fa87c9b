"""Our error against float64 beside that of plain eager code in the same type: the rule of
docs/numerics.md, for the tests and for gpu_cases.py.

A ratio of two errors needs enough of them: cheap cases are drawn three times, and tensors of a few
numbers (`sort` of one block) again and again with other seeds. It also says nothing where eager is
exact by luck, so a floor of a few 1e-8 of the call's largest tensor is added. Cases marked
degenerate have a softmax over one or two keys, whose gradient is 0 on paper and in eager code;
their floor is a few float32 roundings or, in half types, the one rounding that docs/spec.md
grants to R and the sorted blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import cases
from support import HALF_TYPES, Inputs, allowed, cast, present, randn, rms, rms_error
from support import value_and_grads

FLOOR, DEGENERATE_FLOOR = 3e-8, 5e-7
FLOAT_BOUND = 1e-5  # of float32 attention on CUDA, made of matrix products
ENOUGH_NUMBERS = 100
FACTORS = {  # output, gradients
    "cpu": {torch.float32: (1.5, 2.0), torch.bfloat16: (2.0, 3.0), torch.float16: (2.0, 3.0)},
    "cuda": {torch.float32: (2.0, 3.0), torch.bfloat16: (2.0, 3.0), torch.float16: (2.0, 3.0)},
}
LARGEST_NAIVE_BALANCE = 110  # the naive prefix sums hold N^3 numbers a head


@dataclass
class Verdict:
    name: str
    error: float
    eager: float  # eager's error
    bound: float
    largest: float  # RMS of the call's largest tensor

    @property
    def share(self) -> float:
        """Of what is allowed; 1 is the limit. NaN counts as infinite."""
        return self.error / self.bound if self.error <= float("inf") and self.bound else (
            0.0 if self.error == 0 else float("inf"))

    def __str__(self) -> str:
        return (f"{self.name}: RMS error {self.error:.3g}, eager {self.eager:.3g}, allowed "
                f"{self.bound:.3g}, largest tensor {self.largest:.3g}")


def lean_balance(logits: Tensor, iterations: int, temperature: float, causal: str = "none",
                 columns: str = "full", window: int = 0, noise: Tensor | None = None,
                 block_mask: Tensor | None = None) -> Tensor:
    """The reference's balance with running sums, for many blocks and logits of moderate size."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if block_mask is None:
        block_mask = torch.ones(logits.shape[0], logits.shape[2], dtype=torch.bool,
                                device=logits.device)
    where = allowed(block_mask, causal, window)[:, None]

    def row_step(x: Tensor) -> Tensor:
        return torch.where(where, x - x.masked_fill(~where, -1e30).logsumexp(-1, keepdim=True), 0.0)

    x = torch.where(where, logits.to(wide), 0.0)
    if noise is not None:
        x = x + torch.where(where, noise.detach().to(wide), 0.0)
    x = x / temperature
    if iterations > 0:
        x = row_step(x)
    for _ in range(iterations if columns != "none" else 0):
        read = torch.where(where, x.exp(), 0.0)
        if columns == "full":
            total = read.sum(2, keepdim=True).expand_as(read)
        else:
            total = read.cumsum(2)
            if columns == "prior":
                total = 1 + torch.nn.functional.pad(total[:, :, :-1], (0, 0, 1, 0))
        x = row_step(torch.where(where, x - torch.where(where, total, 1.0).log(), 0.0))
    return torch.where(where, x.exp(), 0.0)


def reference(case: Any, inputs: Inputs, grad_output: Tensor) -> dict[str, Tensor]:
    """Output and gradients by ordinary autograd in the types of the inputs."""
    if case.op != "balance" or case.N <= LARGEST_NAIVE_BALANCE:
        return value_and_grads("sinkhorn_reference", case, inputs, grad_output)
    leaf = inputs["logits"].detach().requires_grad_()
    output = lean_balance(**(inputs | {"logits": leaf}), **case.options())
    (grad,) = torch.autograd.grad(output, leaf, grad_output.to(output.device, output.dtype))
    return {"output": output.detach(), "gradient of logits": grad}


def output_gradient(case: Any, inputs: Inputs, dtype: torch.dtype) -> Tensor:
    if case.op == "pool":
        shape = (case.B, -(-case.L // case.block), case.E)
    else:
        shape = inputs["logits" if case.op == "balance" else "query"].shape
    return randn(*shape, seed=909, dtype=torch.float32 if case.op == "balance" else dtype,
                 device=str(next(iter(inputs.values())).device))


Errors = dict[str, tuple[float, float, float]]


def mean_squares(case: Any, inputs: Inputs, ours: dict[str, Tensor], grad_output: Tensor,
                 dtype: torch.dtype) -> Errors:
    """By name: our error, eager's error, and the truth."""
    truth = reference(case, cast(inputs, torch.float64), grad_output)
    eager = reference(case, cast(inputs, dtype), grad_output)
    return {name: (rms_error(ours[name], x) ** 2, rms_error(eager[name], x) ** 2, rms(x) ** 2)
            for name, x in truth.items()}


def half_rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2 if dtype in HALF_TYPES else 0.0


def judge(case: Any, dtype: torch.dtype, device: str, draws: list[Errors]) -> list[Verdict]:
    pooled = {name: [(sum(draw[name][k] for draw in draws) / len(draws)) ** 0.5 for k in range(3)]
              for name in draws[0]}
    largest = max(size for _, _, size in pooled.values())
    lone = case.degenerate or (case.few_keys and device == "cuda" and dtype in HALF_TYPES)
    floor = max(DEGENERATE_FLOOR, half_rounding(dtype)) if lone else FLOOR
    factors = FACTORS[device][dtype]
    if device == "cuda" and dtype == torch.float32 and case.op in ("attention", "sortcut"):
        factors, floor = (0.0, 0.0), FLOAT_BOUND
    return [
        Verdict(name, error, eager, factors[name != "output"] * eager + floor * largest, largest)
        for name, (error, eager, _) in pooled.items()]


def least_numbers(case: Any, inputs: Inputs) -> int:
    return min(inputs[name].numel() for name in present(case, inputs))


def verdicts(case: Any, dtype: torch.dtype, device: str, **more: Any) -> list[Verdict]:
    draws: list[Errors] = []
    numbers = 0
    least, most = (3, 25) if cases.cost(case) < 8_000_000 else (1, 8)
    while len(draws) < least or (numbers < ENOUGH_NUMBERS and len(draws) < most):
        inputs = case.inputs(dtype, device, seed=100 * len(draws), **more)
        numbers += least_numbers(case, inputs)
        grad_output = output_gradient(case, inputs, dtype)
        torch.set_num_threads(2)  # the reference has no use for a second thread, the operators do
        ours = value_and_grads("sinkhorn", case, inputs, grad_output)
        torch.set_num_threads(1)
        draws.append(mean_squares(case, inputs, ours, grad_output, dtype))
    return judge(case, dtype, device, draws)


def assert_as_good_as_eager(case: Any, dtype: torch.dtype, device: str, **more: Any) -> None:
    for verdict in verdicts(case, dtype, device, **more):
        assert verdict.share <= 1, f"{dtype}, {verdict}"
