"""The four operators, typed. Shapes: B batch, H heads, L tokens, D head width, N = ceil(L / block)."""

from __future__ import annotations

from typing import Literal, Optional

import torch
from torch import Tensor

import sinkhorn._library  # noqa: F401  (loads the operators)

Causal = Literal["none", "strict", "inclusive"]
Columns = Literal["full", "prefix", "prior", "none"]
Combine = Literal["concat", "logits", "outputs"]
PoolMode = Literal["sum", "mean", "recent"]


def pool(x: Tensor, block: int, mode: PoolMode = "mean", causal: bool = False,
         mask: Optional[Tensor] = None) -> Tensor:
    """Pools blocks of tokens: x [B, L, E] -> [B, N, E].

    mode: ``sum`` or ``mean`` over the real tokens of each block; with ``causal``, over everything up
    to and including the block's first token; ``recent`` (causal only): the mean over the ``block``
    tokens that end there. mask [B, L] bool, true = real token.
    """
    return torch.ops.sinkhorn.pool(x, block, mode, causal, mask)


def balance(logits: Tensor, iterations: int = 5, temperature: float = 0.75,
            causal: Causal = "none", columns: Columns = "full", window: int = 0,
            noise: Optional[Tensor] = None, block_mask: Optional[Tensor] = None) -> Tensor:
    """Sinkhorn balancing in the log domain: logits [B, H, N, N] -> R, rows summing to 1.

    Row = destination block, column = source block. causal: ``strict`` lets destination i read sources
    j < i - window, ``inclusive`` j <= i. columns: ``full`` normalises over all rows (under a causal
    rule this leaks the future); ``prefix`` over rows up to i; ``prior`` discounts a source by what
    earlier rows have read of it; ``none`` leaves columns alone. noise, of the shape of logits, is
    added as given. block_mask [B, N] bool, true = the block has a real token.
    """
    return torch.ops.sinkhorn.balance(logits, iterations, temperature, causal, columns, window,
                                      noise, block_mask)


def attention(query: Tensor, key: Tensor, value: Tensor, sort: Optional[Tensor], block: int,
              causal: Causal = "none", combine: Combine = "concat", window: int = 0,
              mask: Optional[Tensor] = None, scale: Optional[float] = None,
              dropout_p: float = 0.0) -> Tensor:
    """Attention to the own block, the window around it, and the block that was sorted into its place.

    query, key, value [B, H, L, D], sort [B, H, N, N] as ``balance`` gives it -> [B, H, L, D]. With
    sort=None: block-local (window 0) or sliding-window attention. combine: one softmax over
    everything (``concat``), the paper's sum of scores (``logits``), or two softmaxes (``outputs``).
    mask [B, L] bool, true = real token. scale: 1/sqrt(D) by default.
    """
    return torch.ops.sinkhorn.attention(query, key, value, sort, block, causal, combine, window,
                                        mask, scale, dropout_p)


def sortcut(query: Tensor, key: Tensor, value: Tensor, sort: Tensor, block: int, budget: int,
            mask: Optional[Tensor] = None, scale: Optional[float] = None,
            dropout_p: float = 0.0) -> Tensor:
    """Attention of every query to the first ``budget`` sorted blocks and nothing else.

    query [B, H, Lq, D], key, value [B, H, L, D], sort [B, H, N, N] -> [B, H, Lq, D]. Bidirectional.
    mask [B, L] bool describes the keys.
    """
    return torch.ops.sinkhorn.sortcut(query, key, value, sort, block, budget, mask, scale,
                                      dropout_p)


def cpu_form() -> str:
    """The CPU kernels in use: ``baseline``, ``avx2`` or ``avx512`` (SINKHORN_CPU forces one)."""
    return torch.ops.sinkhorn.cpu_form()
