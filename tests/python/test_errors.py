"""Nonsense throws, with the offending value in the message: a test for each item of docs/spec.md.

Each case takes a good call and spoils one argument. It runs on real and on Meta tensors, since
under torch.compile the latter is where a user meets the error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

B, H, L, D, BLOCK, N = 2, 3, 7, 4, 3, 3


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def mask(*shape: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


GOOD: dict[str, dict[str, Any]] = {
    "pool": dict(x=t(B, L, 5), block=BLOCK, mode="mean", causal=False, mask=mask(B, L)),
    "balance": dict(logits=t(B, H, N, N), iterations=2, temperature=0.75, causal="strict",
                    columns="prefix", window=0, noise=t(B, H, N, N), block_mask=mask(B, N)),
    "attention": dict(query=t(B, H, L, D), key=t(B, H, L, D), value=t(B, H, L, D),
                      sort=t(B, H, N, N), block=BLOCK, causal="none", combine="concat", window=0,
                      mask=mask(B, L), scale=None, dropout_p=0.0),
    "sortcut": dict(query=t(B, H, 5, D), key=t(B, H, L, D), value=t(B, H, L, D), sort=t(B, H, N, N),
                    block=BLOCK, budget=2, mask=mask(B, L), scale=None, dropout_p=0.0),
}

TYPE_NAMES = {
    torch.float64: ("double", "float64"), torch.float32: ("float",), torch.int64: ("long", "int64"),
    torch.uint8: ("byte", "uint8", "unsigned char"), torch.bfloat16: ("bfloat16",),
    torch.float16: ("half", "float16"),
    torch.complex64: ("complexfloat", "complex64", "complex<float>"),
}
NUMBER = re.compile(r"-?(?:\d+\.?\d*(?:e[+-]?\d+)?|nan|inf)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Bad:
    """A spoilt call and what its message must name: each item of `names` is a word, number or type,
    or a tuple of alternatives."""

    op: str
    why: str
    changes: dict[str, Any]
    names: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.op}: {self.why}"


def named(message: str, item: Any) -> bool:
    if isinstance(item, tuple) and not isinstance(item, torch.Size):  # which is a tuple, too
        return any(named(message, alternative) for alternative in item)
    if isinstance(item, torch.Size):
        return list(item) in [[int(x) for x in re.findall(r"-?\d+", group)]
                              for group in re.findall(r"[\[(]([-\d, ]*)[\])]", message)]
    if isinstance(item, torch.dtype):
        return any(name in message.lower() for name in TYPE_NAMES[item])
    if isinstance(item, str):
        return item in message
    numbers = [float(x) for x in NUMBER.findall(message)]
    return any(x == item or (x != x and item != item) or abs(x - item) < 1e-6 for x in numbers)


def shape(*sizes: int) -> torch.Size:
    return torch.Size(sizes)


def wrong_shape(op: str, name: str, *sizes: int, size: int | None = None,
                dtype: torch.dtype = torch.float32) -> Bad:
    """One tensor of another shape; the message shows the shape, the rank, or the one wrong size."""
    dtype = torch.bool if "mask" in name else dtype
    rank = len(sizes) if len(sizes) != GOOD[op][name].dim() else None
    clue = size if size is not None else rank
    names = (shape(*sizes), clue) if clue is not None else (shape(*sizes),)
    return Bad(op, f"{name} of shape {list(sizes)}", {name: t(*sizes, dtype=dtype)}, (names,))


def wrong_type(op: str, name: str, dtype: torch.dtype) -> Bad:
    # Were the query alone of another type, the message may as well blame the keys.
    names = (dtype, torch.float32) if name == "query" else (dtype,)
    return Bad(op, f"{name} of type {dtype}", {name: GOOD[op][name].to(dtype)}, (names,))


def wrong_value(op: str, name: str, value: Any, **also: Any) -> Bad:
    return Bad(op, f"{name}={value}" + "".join(f", {k}={v}" for k, v in also.items()),
               {name: value, **also}, (value,))


def clash(op: str, *names: Any, **changes: Any) -> Bad:
    return Bad(op, " with ".join(f"{k}={v}" for k, v in changes.items()), changes, names)


def zero(op: str, letter: str, **changes: Any) -> Bad:
    return Bad(op, f"{letter} = 0", changes, (0,))


NAN = float("nan")
E0 = t(B, L, 0)

BAD: list[Bad] = [
    # Wrong rank or size; nothing broadcasts.
    wrong_shape("pool", "x"),
    wrong_shape("pool", "x", L, 5),
    wrong_shape("pool", "x", 1, B, L, 5),
    wrong_shape("pool", "mask", L),
    wrong_shape("pool", "mask", B, L + 2, size=L + 2),
    wrong_shape("pool", "mask", 1, L, size=1),
    wrong_shape("balance", "logits", H, N, N),
    wrong_shape("balance", "logits", B, H, N, N + 1, size=N + 1),
    wrong_shape("balance", "noise", N, N),
    wrong_shape("balance", "noise", 1, H, N, N, size=1),
    wrong_shape("balance", "noise", B, H, N, 1, size=1),
    wrong_shape("balance", "block_mask", N),
    wrong_shape("balance", "block_mask", B, N + 2, size=N + 2),
    wrong_shape("balance", "block_mask", 1, N, size=1),
    *(wrong_shape(op, name, *sizes, size=size)
      for op in ("attention", "sortcut")
      for name in ("query", "key", "value")
      for sizes, size in (((H, L, D), None), ((1, H, L, D), 1), ((B, 1, L, D), 1),
                          ((B, H, L, D + 2), D + 2), ((B, H, L + 6, D), L + 6))
      if not (op == "sortcut" and name == "query" and size == L + 6)),  # Lq is free there
    *(wrong_shape(op, "sort", *sizes, size=size)
      for op in ("attention", "sortcut")
      for sizes, size in (((H, N, N), None), ((B, 1, N, N), 1), ((1, H, N, N), 1),
                          ((B, H, N + 2, N + 2), N + 2), ((B, H, N, N + 2), N + 2),
                          ((B, H, 2, 2), 2))),
    *(wrong_shape(op, "mask", *sizes, size=size)
      for op in ("attention", "sortcut")
      for sizes, size in (((L,), None), ((1, L), 1), ((B, L + 2), L + 2), ((B, 5), 5))),
    # Unknown words.
    wrong_value("pool", "mode", "median"),
    wrong_value("pool", "mode", ""),
    wrong_value("pool", "mode", "Mean"),
    wrong_value("balance", "causal", "sideways"),
    wrong_value("balance", "columns", "diagonal"),
    wrong_value("attention", "causal", "sideways"),
    wrong_value("attention", "combine", "product"),
    # block < 1.
    *(wrong_value(op, "block", block)
      for op in ("pool", "attention", "sortcut") for block in (0, -3)),
    # L, D, E or H = 0.
    zero("pool", "E", x=E0),
    zero("pool", "L", x=t(B, 0, 5), mask=mask(B, 0)),
    zero("balance", "H", logits=t(B, 0, N, N), noise=None),
    zero("balance", "N", logits=t(B, H, 0, 0), noise=None, block_mask=None),
    *(zero(op, letter, **{x: t(*sizes) for x in ("query", "key", "value")}, sort=t(*sort),
           mask=None)
      for op in ("attention", "sortcut")
      for letter, sizes, sort in (("D", (B, H, L, 0), (B, H, N, N)),
                                  ("H", (B, 0, L, D), (B, 0, N, N)),
                                  ("L", (B, H, 0, D), (B, H, 0, 0)))),
    # Numbers out of range.
    *(wrong_value("sortcut", "budget", budget) for budget in (0, -1, N + 1)),
    *(wrong_value("balance", "temperature", value) for value in (0.0, -0.5, NAN)),
    wrong_value("balance", "iterations", -1),
    wrong_value("balance", "window", -1),
    wrong_value("balance", "window", -1, causal="none", columns="full"),
    wrong_value("attention", "window", -1),
    wrong_value("attention", "window", -2, sort=None),
    *(wrong_value(op, "dropout_p", value)
      for op in ("attention", "sortcut") for value in (-0.1, 1.0, 1.5, NAN)),
    # Options that exclude each other.
    clash("balance", "prefix", "none", columns="prefix", causal="none"),
    clash("balance", "prior", "none", columns="prior", causal="none"),
    clash("balance", "inclusive", 1, causal="inclusive", window=1),
    clash("attention", "inclusive", 2, causal="inclusive", window=2),
    clash("attention", "logits", 1, combine="logits", window=1),
    clash("attention", "logits", "strict", combine="logits", causal="strict"),
    clash("pool", "recent", mode="recent", causal=False),
    # Types: masks are bool, q, k and v share one float type, sort is float32 or that type.
    *(wrong_type(op, name, dtype)
      for op, name in (("pool", "mask"), ("balance", "block_mask"), ("attention", "mask"),
                       ("sortcut", "mask"))
      for dtype in (torch.uint8, torch.float32)),
    wrong_type("pool", "x", torch.int64),
    wrong_type("pool", "x", torch.complex64),
    wrong_type("balance", "logits", torch.int64),
    wrong_type("balance", "noise", torch.int64),
    *(wrong_type(op, name, dtype)
      for op in ("attention", "sortcut")
      for name, dtype in (("query", torch.int64), ("query", torch.float64), ("key", torch.bfloat16),
                          ("value", torch.float16), ("sort", torch.float64),
                          ("sort", torch.bfloat16), ("sort", torch.int64))),
    *(Bad(op, "a float16 sort beside bfloat16 tokens",
          {x: GOOD[op][x].bfloat16() for x in ("query", "key", "value")}
          | {"sort": GOOD[op]["sort"].half()}, (torch.float16,))
      for op in ("attention", "sortcut")),
    *(Bad(op, "integer query, key and value",
          {x: GOOD[op][x].long() for x in ("query", "key", "value")}, (torch.int64,))
      for op in ("attention", "sortcut")),
]


def run(op: str, arguments: dict[str, Any], device: str) -> torch.Tensor:
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x
             for name, x in arguments.items()}
    return getattr(torch.ops.sinkhorn, op)(**moved)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("op", GOOD)
def test_the_call_that_is_spoilt_below_is_good(op, device):
    assert run(op, GOOD[op], device).numel() > 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("bad", BAD, ids=str)
def test_nonsense_throws_and_names_the_offending_value(bad, device):
    with pytest.raises((ValueError, RuntimeError, TypeError)) as caught:
        run(bad.op, GOOD[bad.op] | bad.changes, device)
    message = str(caught.value)
    for item in bad.names:
        assert named(message, item), f"{item} is not named in: {message}"


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad.op != "pool"][::5], ids=str)
def test_nonsense_throws_when_gradients_are_wanted_too(bad):
    arguments = {name: x.clone().requires_grad_()
                 if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                 for name, x in (GOOD[bad.op] | bad.changes).items()}
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        run(bad.op, arguments, "cpu")


@pytest.mark.parametrize("changes", [
    dict(combine="logits", window=2), dict(combine="logits", causal="strict"),
    dict(causal="inclusive", window=2), dict(causal="inclusive", combine="logits", window=1)],
    ids=str)
def test_without_sort_the_exclusions_of_combine_and_inclusive_do_not_apply(changes):
    out = run("attention", GOOD["attention"] | changes | {"sort": None}, "cpu")
    assert torch.isfinite(out).all()
