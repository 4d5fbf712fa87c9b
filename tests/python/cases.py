"""The shared list of cases: GRADCHECK, every legal combination of options at tiny sizes, and
VALUES, a covering subset of the large sizes. A case knows its operator, options and inputs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import product
from typing import Any, ClassVar

import torch

from support import MASK_KINDS, Inputs, allowed_for, arithmetic_type, make_mask, make_sort
from support import num_blocks, randn, to_device


class Case:
    """Base: `options()` are the arguments that are not tensors, `inputs()` those that are."""

    op: ClassVar[str]
    grads: ClassVar[tuple[str, ...]]  # the differentiable inputs
    option_names: ClassVar[tuple[str, ...]]
    few_keys: ClassVar[bool] = False  # every softmax is over one or two keys, however long L is

    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.option_names}

    def __str__(self) -> str:
        return "-".join([self.op] + [f"{f.name}={getattr(self, f.name)}" for f in fields(self)])


@dataclass(frozen=True)
class Pool(Case):
    op: ClassVar[str] = "pool"
    grads: ClassVar[tuple[str, ...]] = ("x",)
    option_names: ClassVar[tuple[str, ...]] = ("block", "mode", "causal")
    mode: str
    causal: bool
    mask: str = "none"
    B: int = 2
    L: int = 7
    block: int = 3
    E: int = 2

    @property
    def degenerate(self) -> bool:
        return self.L <= 2

    def inputs(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Inputs:
        x = randn(self.B, self.L, self.E, seed=seed, dtype=dtype)
        mask = make_mask(self.mask, self.B, self.L, self.block, seed)
        return to_device({"x": x, "mask": mask}, device)


@dataclass(frozen=True)
class Balance(Case):
    op: ClassVar[str] = "balance"
    grads: ClassVar[tuple[str, ...]] = ("logits",)
    option_names: ClassVar[tuple[str, ...]] = (
        "iterations", "temperature", "causal", "columns", "window")
    causal: str
    columns: str
    iterations: int
    window: int = 0
    noise: bool = False
    masked: bool = False
    B: int = 3
    H: int = 2
    N: int = 4
    temperature: float = 0.75

    @property
    def degenerate(self) -> bool:
        return self.N <= 2

    def inputs(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Inputs:
        shape = (self.B, self.H, self.N, self.N)
        noise = randn(*shape, seed=seed + 1, dtype=dtype) if self.noise else None
        live = None
        if self.masked:  # a hole in one row, pads on the right in the next, nothing in the last
            live = torch.ones(self.B, self.N, dtype=torch.bool)
            live[0, self.N // 2 - 1] = False
            live[1 % self.B, -(-self.N // 2):] = False
            live[-1] = self.B == 1
        logits = randn(*shape, seed=seed, dtype=dtype)
        return to_device({"logits": logits, "noise": noise, "block_mask": live}, device)


@dataclass(frozen=True)
class Attention(Case):
    op: ClassVar[str] = "attention"
    grads: ClassVar[tuple[str, ...]] = ("query", "key", "value", "sort")
    option_names: ClassVar[tuple[str, ...]] = ("block", "causal", "combine", "window", "scale")
    causal: str
    combine: str = "concat"
    window: int = 0
    mask: str = "none"
    sorted: bool = True
    B: int = 2
    H: int = 2
    L: int = 7
    block: int = 3
    D: int = 2
    scale: float | None = None
    zero_rows: bool = False  # of the sort

    @property
    def degenerate(self) -> bool:
        return self.L <= 2

    @property
    def few_keys(self) -> bool:
        return self.block == 1 and self.window == 0

    def inputs(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0,
               sort_dtype: torch.dtype | None = None, outside: float = 3.0) -> Inputs:
        shape = (self.B, self.H, self.L, self.D)
        mask = make_mask(self.mask, self.B, self.L, self.block, seed)
        sort = None
        if self.sorted:
            where = allowed_for(mask, self.B, self.L, self.block, self.causal, self.window)
            sort = make_sort(where, self.H, sort_dtype or arithmetic_type(dtype), seed, outside,
                             self.zero_rows)
        return to_device({
            "query": randn(*shape, seed=seed + 1, dtype=dtype),
            "key": randn(*shape, seed=seed + 2, dtype=dtype),
            "value": randn(*shape, seed=seed + 3, dtype=dtype),
            "sort": sort, "mask": mask}, device)


@dataclass(frozen=True)
class Sortcut(Case):
    op: ClassVar[str] = "sortcut"
    grads: ClassVar[tuple[str, ...]] = ("query", "key", "value", "sort")
    option_names: ClassVar[tuple[str, ...]] = ("block", "budget", "scale")
    budget: int
    mask: str = "none"
    B: int = 2
    H: int = 2
    Lq: int = 5
    L: int = 7
    block: int = 3
    D: int = 2
    scale: float | None = None
    zero_rows: bool = False  # of the sort

    @property
    def degenerate(self) -> bool:
        return self.L <= 2

    def inputs(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0,
               sort_dtype: torch.dtype | None = None, outside: float = 3.0) -> Inputs:
        shape = (self.B, self.H, self.L, self.D)
        mask = make_mask(self.mask, self.B, self.L, self.block, seed)
        where = allowed_for(mask, self.B, self.L, self.block, "none")
        return to_device({
            "query": randn(self.B, self.H, self.Lq, self.D, seed=seed + 1, dtype=dtype),
            "key": randn(*shape, seed=seed + 2, dtype=dtype),
            "value": randn(*shape, seed=seed + 3, dtype=dtype),
            "sort": make_sort(where, self.H, sort_dtype or arithmetic_type(dtype), seed, outside,
                              self.zero_rows),
            "mask": mask}, device)


# Every legal combination of options ---------------------------------------------------------------

POOL_MODES = [("sum", False), ("mean", False), ("sum", True), ("mean", True), ("recent", True)]

BALANCE_RULES = [("none", columns, 0) for columns in ("full", "none")] + [
    (causal, columns, window)
    for causal, windows in (("strict", (0, 1, 2)), ("inclusive", (0,)))
    for columns in ("full", "prefix", "prior", "none")
    for window in windows
]

ATTENTION_RULES = [  # causal, combine, window; with a sort
    (causal, combine, window)
    for causal, combine, window in product(
        ("none", "strict", "inclusive"), ("concat", "logits", "outputs"), (0, 1, 2))
    if not (causal == "inclusive" and window > 0)
    and not (combine == "logits" and (window > 0 or causal == "strict"))
]
LOCAL_RULES = list(product(("none", "strict", "inclusive"), (0, 1, 2)))  # causal, window; no sort


def _length(window: int) -> int:
    return 10 if window == 2 else 7  # strict with window 2 needs a fourth block to have a source


GRADCHECK: list[Case] = [
    *(Pool(mode, causal, mask) for (mode, causal), mask in product(POOL_MODES, MASK_KINDS)),
    *(Balance(causal, columns, iterations, window, noise, masked)
      for (causal, columns, window), iterations, noise, masked in product(
          BALANCE_RULES, (0, 1, 3), (False, True), (False, True))),
    *(Attention(causal, combine, window, mask, L=_length(window))
      for (causal, combine, window), mask in product(ATTENTION_RULES, MASK_KINDS)),
    *(Attention(causal, "concat", window, mask, sorted=False, L=_length(window))
      for (causal, window), mask in product(LOCAL_RULES, MASK_KINDS)),
    *(Sortcut(budget, mask) for budget, mask in product((1, 2, 3), MASK_KINDS)),
    # Shapes and scales the combinations above leave out: one short block, blocks of 1, a scale.
    Pool("mean", False, L=2, block=5),
    Pool("recent", True, "holes", L=5, block=1),
    Balance("none", "full", 3, N=1),
    Balance("strict", "prior", 3, N=1),
    Attention("none", L=2, block=5),
    Attention("strict", "outputs", L=4, block=1, mask="holes"),
    Attention("inclusive", "logits", L=1, block=1, D=1),
    Attention("none", "concat", 1, "holes", scale=0.3),
    Sortcut(1, "right", L=2, block=5),
    Sortcut(3, "holes", L=4, block=1, scale=-0.7),
]

# Larger sizes: L of 1, 2, b-1, b, b+1, 1000; b 1 to 256; D 1 to 256; window 0, 1, 2 -------------


def _attention(B, H, L, block, D, causal, combine, window, mask, sorted=True, scale=None):
    return Attention(causal, combine, window, mask, sorted, B, H, L, block, D, scale)


ATTENTION_VALUES = [
    _attention(64, 2, 1, 1, 17, "none", "concat", 0, "none"),
    _attention(64, 2, 1, 8, 64, "inclusive", "logits", 0, "none"),
    _attention(4, 2, 1, 256, 17, "strict", "outputs", 1, "row"),
    _attention(64, 2, 2, 1, 64, "strict", "concat", 0, "none"),
    _attention(64, 2, 2, 3, 64, "none", "outputs", 2, "right"),
    _attention(8, 2, 7, 8, 64, "none", "concat", 0, "holes"),
    _attention(8, 2, 8, 8, 64, "none", "logits", 0, "holes"),
    _attention(8, 2, 9, 8, 64, "strict", "concat", 1, "right"),
    _attention(8, 3, 15, 16, 17, "inclusive", "concat", 0, "holes"),
    _attention(8, 3, 16, 16, 17, "strict", "outputs", 0, "none"),
    _attention(8, 3, 17, 16, 17, "inclusive", "outputs", 0, "right"),
    _attention(8, 2, 2, 3, 128, "inclusive", "concat", 0, "none"),
    _attention(8, 2, 4, 3, 128, "strict", "concat", 0, "holes"),
    _attention(2, 2, 63, 64, 64, "none", "concat", 0, "right"),
    _attention(2, 2, 64, 64, 128, "inclusive", "logits", 0, "none"),
    _attention(2, 2, 65, 64, 64, "strict", "concat", 0, "holes"),
    _attention(2, 2, 99, 100, 17, "strict", "concat", 1, "none"),
    _attention(2, 1, 101, 100, 128, "none", "outputs", 1, "block"),
    _attention(2, 1, 255, 256, 64, "inclusive", "concat", 0, "none"),
    _attention(2, 1, 256, 256, 17, "none", "logits", 0, "right"),
    _attention(2, 1, 257, 256, 17, "strict", "outputs", 0, "row"),
    _attention(1, 1, 1000, 1, 17, "strict", "concat", 2, "none"),
    _attention(1, 1, 1000, 3, 1, "none", "concat", 1, "holes"),
    _attention(2, 2, 1000, 8, 17, "strict", "concat", 2, "right"),
    _attention(2, 2, 1000, 16, 64, "none", "concat", 0, "right"),
    _attention(2, 2, 1000, 16, 64, "inclusive", "logits", 0, "block"),
    _attention(1, 2, 1000, 64, 64, "strict", "concat", 0, "none"),
    _attention(2, 1, 1000, 64, 64, "strict", "outputs", 1, "row"),
    _attention(1, 1, 1000, 64, 128, "none", "concat", 2, "holes"),
    _attention(1, 2, 1000, 64, 64, "none", "logits", 0, "none", scale=0.2),
    _attention(2, 1, 1000, 100, 64, "inclusive", "concat", 0, "right"),
    _attention(1, 1, 1000, 16, 256, "strict", "concat", 1, "block"),
    _attention(1, 2, 1000, 256, 1, "inclusive", "outputs", 0, "none"),
    _attention(1, 1, 1000, 256, 128, "none", "outputs", 0, "right"),
    _attention(2, 1, 1000, 64, 64, "strict", "concat", 1, "right", False),
    _attention(2, 1, 1000, 100, 17, "none", "concat", 2, "holes", False),
    _attention(1, 2, 1000, 16, 256, "inclusive", "concat", 0, "none", False),
]

SORTCUT_VALUES = [
    Sortcut(1, "none", 64, 2, 1, 1, 1, 64),
    Sortcut(1, "right", 16, 2, 9, 7, 8, 17),
    Sortcut(2, "none", 4, 2, 65, 17, 16, 64),
    Sortcut(2, "holes", 1, 2, 3, 1000, 8, 64),
    Sortcut(3, "block", 1, 2, 257, 1000, 64, 128),
    Sortcut(10, "right", 1, 2, 100, 1000, 100, 64, scale=0.1),
    Sortcut(4, "row", 2, 1, 20, 1000, 256, 256),
    Sortcut(5, "none", 1, 2, 1000, 1000, 16, 1),
]


def _balance(B, H, N, causal, columns, iterations, window=0, noise=True, masked=False, T=0.75):
    return Balance(causal, columns, iterations, window, noise, masked, B, H, N, T)


BALANCE_VALUES = [
    _balance(16, 4, 1, "none", "full", 5),
    _balance(16, 4, 2, "inclusive", "prefix", 5),
    _balance(4, 2, 15, "none", "full", 5, masked=True),
    _balance(4, 2, 16, "none", "none", 1),
    _balance(4, 2, 17, "none", "full", 20, noise=False),
    _balance(4, 2, 16, "strict", "prior", 20, noise=False),
    _balance(4, 2, 31, "strict", "prefix", 5, 1, masked=True),
    _balance(4, 2, 33, "inclusive", "prior", 5, masked=True),
    _balance(4, 2, 16, "strict", "full", 5, 2),
    _balance(4, 2, 16, "inclusive", "full", 5),
    _balance(4, 2, 20, "inclusive", "none", 2, masked=True),
    _balance(4, 2, 16, "none", "full", 0),
    _balance(2, 2, 64, "none", "full", 10, T=0.25),
    _balance(2, 2, 65, "strict", "prefix", 10, T=1.0),
    _balance(2, 2, 129, "strict", "prior", 5, 1, masked=True),
    _balance(2, 2, 129, "inclusive", "prefix", 2, noise=False),
    _balance(1, 1, 200, "none", "full", 3, masked=True),
    _balance(1, 1, 200, "strict", "prior", 3),
]

POOL_VALUES = [
    Pool("mean", False, "none", 64, 1, 1, 64),
    Pool("sum", True, "right", 64, 2, 3, 17),
    Pool("mean", False, "holes", 8, 63, 64, 17),
    Pool("recent", True, "holes", 8, 65, 64, 64),
    Pool("sum", False, "none", 2, 1000, 256, 64),
    Pool("mean", False, "block", 2, 1000, 100, 128),
    Pool("sum", True, "holes", 2, 1000, 1, 17),
    Pool("mean", True, "right", 2, 1000, 16, 256),
    Pool("mean", True, "row", 2, 1000, 3, 1),
    Pool("recent", True, "none", 2, 1000, 64, 64),
    Pool("recent", True, "row", 2, 1000, 8, 17),
]

# Rows of `sort` that are all zeros weigh nothing; the weight jumps there, so that a gradient cannot
# be checked by differences. Blocks all full, the last one short, and masks.
ZERO_ROWS: list[Case] = [
    *(Attention(causal, combine, window, mask, True, 2, 2, L, 8, 20, zero_rows=True)
      for causal, combine, window in ATTENTION_RULES
      for L, mask in ((40, "none"), (37, "none"), (40, "holes"))),
    *(Sortcut(budget, mask, 2, 2, 9, L, 8, 20, zero_rows=True)
      for budget in (1, 3) for L, mask in ((40, "none"), (37, "none"), (40, "holes"))),
]

VALUES: list[Case] = [*POOL_VALUES, *BALANCE_VALUES, *ATTENTION_VALUES, *SORTCUT_VALUES, *ZERO_ROWS]


def cost(case: Case) -> int:
    """Roughly what the naive reference spends on a case."""
    if isinstance(case, (Attention, Sortcut)):
        padded = num_blocks(case.L, case.block) * case.block
        return case.B * case.H * padded * case.block * case.D * (2 + getattr(case, "window", 0))
    return 0


def params(cases: list[Case], form_every: int = 3) -> list[Any]:
    """As pytest parameters; every so many, if cheap, run again for each form of the CPU kernels."""
    import pytest  # here, so that the list also serves where there is none

    marked = {case for case in cases[::form_every] if cost(case) < 8_000_000}
    return [pytest.param(case, id=str(case), marks=[pytest.mark.each_form] * (case in marked))
            for case in cases]
