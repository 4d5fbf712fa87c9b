"""Helpers shared by the tests: the libraries, masks and sorts to feed, and how errors are measured.

`call` and `value_and_grads` run any case of cases.py through either namespace: `sinkhorn`, the
operators under test, or `sinkhorn_reference`, the naive twin with ordinary autograd.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

REPO = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("SINKHORN_BUILD_DIR", REPO / "build" / "release")).resolve()

MASK_KINDS = ("none", "right", "holes", "row", "block")
HALF_TYPES = (torch.bfloat16, torch.float16)

Inputs = dict[str, "Tensor | None"]


def load_libraries(reference: bool = True) -> None:
    for name in ("libsinkhorn.so", "libsinkhorn_reference.so")[: 2 if reference else 1]:
        path = BUILD / name
        if not path.exists():
            raise FileNotFoundError(f"no {path}: run `make build` or set SINKHORN_BUILD_DIR")
        torch.ops.load_library(str(path))


def devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def takes_hoppers_kernels() -> bool:
    """As src/kernels/cuda/device.cu decides for the current card."""
    portable = os.environ.get("SINKHORN_CUDA_PORTABLE", "") not in ("", "0")
    return torch.cuda.get_device_capability() == (9, 0) and not portable


def most_shared() -> int:
    """Bytes of shared memory that a CTA may ask for, as src/kernels/cuda/device.cu has it."""
    asked = int(os.environ.get("SINKHORN_CUDA_SHARED_KB", "0")) * 1024
    found = torch.cuda.get_device_properties().shared_memory_per_block_optin
    return min(found, asked) if asked > 0 else found


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64,
          device: str = "cpu") -> Tensor:
    """The same numbers on every device and, up to rounding, in every type."""
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64).to(device, dtype)


def num_blocks(length: int, block: int) -> int:
    return (length + block - 1) // block


def make_mask(kind: str, batch: int, length: int, block: int, seed: int = 0) -> Tensor | None:
    """[B, L] bool, true = real; None for `none`.

    right: ragged pads on the right.  holes: pads anywhere.  row: the first batch row has no real
    token, the others are ragged.  block: the second block is empty in every row, and holes beside.
    """
    if kind == "none":
        return None
    gen = generator(seed + 101)
    if kind in ("right", "row"):
        lengths = torch.randint(1, length + 1, (batch,), generator=gen)
        lengths[0] = (length + 1) // 2  # so that whole blocks are empty
        lengths[-1] = max(1, length - 1)
        mask = torch.arange(length) < lengths[:, None]
        if kind == "row":
            mask[0] = False
        return mask
    mask = torch.rand(batch, length, generator=gen) < 0.7
    mask[:, 0] |= ~mask.any(1)
    if kind == "block":
        begin = block if length > block else 0
        mask[:, begin : begin + block] = False
    return mask


def live_blocks(mask: Tensor, block: int) -> Tensor:
    """[B, L] -> [B, N]: the block has a real token."""
    n = num_blocks(mask.shape[1], block)
    return F.pad(mask, (0, n * block - mask.shape[1])).unflatten(1, (n, block)).any(-1)


def allowed(live: Tensor, causal: str, window: int = 0) -> Tensor:
    """[B, N] -> [B, N, N] bool, row = destination, column = source."""
    index = torch.arange(live.shape[1], device=live.device)
    gap = index[:, None] - index[None, :]
    rule = {"none": gap == gap, "strict": gap > window, "inclusive": gap >= 0}[causal]
    return rule & live[:, :, None] & live[:, None, :]


def allowed_for(mask: Tensor | None, batch: int, length: int, block: int, causal: str,
                window: int = 0) -> Tensor:
    if mask is None:
        mask = torch.ones(batch, length, dtype=torch.bool)
    return allowed(live_blocks(mask, block), causal, window)


def make_sort(where: Tensor, heads: int, dtype: torch.dtype, seed: int = 0,
              outside: float = 3.0, zero_rows: bool = False) -> Tensor:
    """A plausible R, [B, H, N, N]: positive where allowed, rows that do not quite sum to 1 (so that
    dividing by r shows), and `outside` (garbage, or NaN) where it may not be read. With zero_rows
    every third row is all zeros, other rows in other heads."""
    batch, n, _ = where.shape
    scores = randn(batch, heads, n, n, seed=seed + 202)
    where = where[:, None].expand_as(scores)
    rows = scores.masked_fill(~where, -1e30).softmax(-1) * (1 + 0.2 * scores[..., :1].tanh())
    if zero_rows:
        turn = torch.arange(batch * heads).view(batch, heads, 1) + torch.arange(n)
        rows = rows.masked_fill((turn % 3 == 0).unsqueeze(-1), 0.0)
    return torch.where(where, rows, torch.full_like(rows, outside)).to(dtype)


def arithmetic_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def present(case: Any, inputs: Inputs) -> list[str]:
    """The inputs of this call that get a gradient."""
    return [name for name in case.grads if inputs[name] is not None]


def call(namespace: str, case: Any, inputs: Inputs, **more: Any) -> Tensor:
    return getattr(getattr(torch.ops, namespace), case.op)(**inputs, **case.options(), **more)


def value_and_grads(namespace: str, case: Any, inputs: Inputs, grad_output: Tensor | None = None,
                    **more: Any) -> dict[str, Tensor]:
    """The output and the gradient of each differentiable input, by name; strides are kept."""
    names = present(case, inputs)
    leaves = {name: inputs[name].detach().requires_grad_() for name in names}
    output = call(namespace, case, inputs | leaves, **more)
    if grad_output is None:
        grad_output = randn(*output.shape, seed=909)
    grads = torch.autograd.grad(output, list(leaves.values()),
                                grad_output.to(output.device, output.dtype))
    return {"output": output.detach()} | {f"gradient of {n}": g for n, g in zip(names, grads)}


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Every floating input in `dtype`; masks as they are."""
    return {name: x.to(dtype) if x is not None and x.is_floating_point() else x
            for name, x in inputs.items()}


def to_device(inputs: Inputs, device: str) -> Inputs:
    return {name: None if x is None else x.to(device) for name, x in inputs.items()}


def _swapped(x):  # the layout [B, L, H, D] that linear maps produce, seen as [B, H, L, D]
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() > 2 else x.t().contiguous().t()


def _strided(x):  # every second element of a wider tensor, the rest poisoned
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), 1, dtype=x.dtype, device=x.device)
    if x.is_floating_point():
        wide.fill_(float("nan"))
    view = wide[..., 1::2]
    view.copy_(x)
    return view


def _expanded(x):  # one batch row seen by all, stride 0
    return x[:1].expand_as(x)


LAYOUTS = {"swapped": _swapped, "strided": _strided, "expanded": _expanded}


def rms(x: Tensor) -> float:
    return x.double().pow(2).mean().sqrt().item() if x.numel() else 0.0


def rms_error(x: Tensor, truth: Tensor) -> float:
    assert x.shape == truth.shape, f"shape {tuple(x.shape)}, expected {tuple(truth.shape)}"
    return rms(x.double() - truth.double())


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor], why: str) -> None:
    assert actual.keys() == expected.keys()
    for name in actual:
        assert torch.equal(actual[name], expected[name]), f"{name}: {why}"


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float,
                why: str) -> None:
    """RMS error relative to the tensor itself; 1e-3 of that relative to the largest tensor of the
    call, for gradients that are 0 on paper."""
    scale = max(rms(x) for x in expected.values())
    for name, truth in expected.items():
        error = rms_error(actual[name], truth)
        bound = tolerance * (rms(truth) + 1e-3 * scale)
        assert error <= bound, f"{name}: RMS error {error:.3g} > {bound:.3g}: {why}"


def layer_weights(width: int, heads: int, head_width: int, max_blocks: int, seed: int = 0,
                  dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, Tensor]:
    """Linear maps for `layer`: the sort network, and q, k, v in one."""
    return {
        "sort": randn(width, heads * max_blocks, seed=seed + 1, dtype=dtype, device=device),
        "qkv": randn(width, 3 * heads * head_width, seed=seed + 2, dtype=dtype, device=device)
        / width**0.5,
    }


def layer(x: Tensor, mask: Tensor | None, weights: dict[str, Tensor], heads: int, block: int,
          causal: str = "none", columns: str = "full", pooling: str = "mean", window: int = 0,
          combine: str = "concat") -> Tensor:
    """pool -> linear -> balance -> attention, the operators composed as the module does it."""
    ops = torch.ops.sinkhorn
    live = None
    if mask is not None:
        x = torch.where(mask[..., None], x, 0.0)
        live = ops.pool(mask[..., None].float(), block, "sum", False).squeeze(-1) > 0  # [B, N]
    pooled = ops.pool(x, block, pooling, causal != "none", mask)  # [B, N, E]
    n = pooled.shape[1]
    # bmm: a plain matmul folds B and N into one size, and torch.export stumbles over that.
    logits = torch.bmm(pooled, weights["sort"].expand(x.shape[0], -1, -1))
    logits = logits.unflatten(-1, (heads, -1))[..., :n].transpose(1, 2)  # [B, H, N, N]
    sort = ops.balance(logits, 5, 0.75, causal, columns, window, None, live)  # [B, H, N, N]
    q, k, v = (x @ weights["qkv"]).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return ops.attention(q, k, v, sort, block, causal, combine, window, mask)
