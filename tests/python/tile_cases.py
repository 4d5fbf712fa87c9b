"""More of the shared list: sizes at which a GPU kernel changes its tiles or its way, one case for
each head width and block with the options taken in turn, and lengths that give many blocks."""

from __future__ import annotations

from itertools import cycle, product

import cases
from cases import Attention, Balance, Case, Pool, Sortcut

WIDTHS = (16, 32, 64, 80, 128, 256)
BLOCKS = (1, 5, 8, 16, 32, 64, 100, 128, 256)
MASKS = ("none", "right", "none", "holes", "none", "block", "row")
BALANCE_SIZES = (1, 2, 5, 16, 17, 33, 64, 100, 128, 129, 200, 512, 1024, 1100, 2100)


def _ragged(block: int) -> int:
    """A length of a few blocks, the last one short."""
    blocks = 33 if block <= 8 else 9 if block <= 32 else 4 if block <= 64 else 2
    return block * blocks + (block + 1) // 3


def _batch(block: int) -> tuple[int, int]:  # B, H
    return (3, 2) if block <= 32 else (2, 2) if block <= 64 else (2, 1)


def _attentions() -> list[Attention]:
    rules = cycle([(*rule, True) for rule in cases.ATTENTION_RULES]
                  + [(causal, "concat", window, False) for causal, window in cases.LOCAL_RULES])
    masks = cycle(MASKS)
    found = []
    for D, block in product(WIDTHS, BLOCKS):
        causal, combine, window, with_sort = next(rules)
        while window > 1 and block >= 100:
            causal, combine, window, with_sort = next(rules)
        B, H = _batch(block)
        found.append(Attention(causal, combine, window, next(masks), with_sort, B, H,
                               _ragged(block), block, D))
    return found


def _every_rule() -> list[Attention]:
    """All options at the sizes that matter most."""
    found = []
    for D, block in ((64, 64), (64, 16), (128, 64), (32, 32)):
        masks = cycle(MASKS)
        for causal, combine, window in cases.ATTENTION_RULES:
            found.append(Attention(causal, combine, window, next(masks), True, 1, 2,
                                   5 * block + block // 3, block, D))
        for causal, window in cases.LOCAL_RULES:
            found.append(Attention(causal, "concat", window, next(masks), False, 1, 2,
                                   5 * block + block // 3, block, D))
    return found


def _attention(B, H, L, block, D, causal="none", window=0, mask="none", combine="concat",
               with_sort=True, scale=None):
    return Attention(causal, combine, window, mask, with_sort, B, H, L, block, D, scale)


MANY_BLOCKS = [
    _attention(2, 2, 1024, 64, 64),
    _attention(2, 2, 1024, 64, 64, "strict"),
    _attention(1, 2, 2048, 128, 64),
    _attention(1, 2, 2048, 128, 64, "strict", 1, "right"),
    _attention(1, 1, 4096, 64, 64),
    _attention(1, 1, 4096 - 17, 64, 64, "strict"),
    _attention(1, 1, 4096 - 17, 64, 64, "inclusive"),
    _attention(1, 1, 4160, 32, 64, "none", 0, "right"),
    _attention(1, 1, 2100, 16, 32, "strict", 0, "holes"),
    _attention(1, 1, 8200, 64, 32, "strict", 1),
    _attention(1, 1, 8192, 64, 64),
    _attention(1, 1, 2048, 256, 64),
    _attention(2, 1, 4096, 64, 64, "strict", 1, with_sort=False),
    _attention(2, 2, 1024, 64, 64, "strict", 1),
    _attention(8, 8, 1000, 64, 64, "strict", 1, with_sort=False),
    _attention(8, 8, 1024, 64, 64, "strict", 1),
    _attention(1, 2, 336, 16, 64, "strict", 2),
    _attention(1, 2, 336, 16, 64, "strict", 4, with_sort=False),
    _attention(1, 2, 512, 32, 40, "strict", 1),
    _attention(2, 2, 1024, 128, 64, "strict"),
    _attention(2, 2, 1024, 128, 40, "inclusive"),
    _attention(1, 1, 1000, 128, 64, "strict", with_sort=False),
    _attention(1, 2, 1024, 64, 64, scale=-0.1),
    _attention(1, 1, 1100, 300, 64, "none", 0, "right"),
    _attention(1, 1, 1100, 512, 32, "strict", 0),
    _attention(5, 3, 300, 64, 64, "strict", 0, "right"),
    _attention(1, 2, 700, 64, 64, "none", 0, "holes", scale=0.5),
    _attention(1, 2, 700, 64, 64, "none", 0, "right", "outputs"),
    _attention(1, 2, 700, 64, 72, "strict", 0, "none"),
    _attention(1, 2, 700, 64, 24, "none", 0, "none"),
    _attention(1, 2, 700, 64, 65, "strict", 1, "right"),
    _attention(1, 2, 700, 64, 250, "none", 0, "none"),
    _attention(1, 2, 700, 64, 120, "inclusive"),
    _attention(1, 2, 700, 16, 40, "strict", 1, "right"),
    _attention(1, 1, 4096, 64, 64, "none", 0, "none", "logits"),
    _attention(1, 1, 4096 - 17, 64, 64, "inclusive", 0, "right", "logits"),
    _attention(1, 1, 2080, 16, 32, "inclusive", 0, "none", "logits"),
]


def _wide_pairs() -> list[Attention]:
    """For attention_bwd_pair at D > 64: whole blocks, whose last tile of 64 is full or
    partly filled; more tiles than a card has multiprocessors. A short last block has weights, and
    is the general kernels'."""
    rules = ("none", "strict", "inclusive")
    found = [_attention(2, 2, length, block, D, causal)
             for D, (block, length), causal in product((72, 96, 128, 136, 256), (
                 (16, 144), (32, 160), (64, 256)), rules)]
    found += [_attention(8, 8, 512, 64, D, causal) for D, causal in product((128, 256), rules)]
    found += [_attention(1, 2, length + block // 3, block, 96, causal)
              for (block, length), causal in product(((16, 144), (64, 256)), rules)]
    return [*found, _attention(1, 2, 256, 64, 100, "strict"), _attention(2, 2, 32, 32, 128),
            _attention(1, 2, 512, 64, 128, scale=-0.1),
            _attention(1, 2, 512, 128, 128, "strict"), _attention(2, 2, 32, 32, 192, "inclusive"),
            _attention(1, 2, 512, 64, 256, scale=-0.1)]


def _narrow_tiles() -> list[Attention]:
    """For Hopper's tiles of 32 columns, D <= 32: whole blocks, whose last tile of 64 or 128 is full
    or partly filled; the tile before; long blocks; more tiles than a card runs at a time."""
    rules = ("none", "strict", "inclusive")
    found = [_attention(2, 2, length, block, D, causal)
             for D, (block, length), causal in product((8, 24, 32), (
                 (16, 144), (32, 160), (64, 256), (128, 384)), rules)]
    found += [_attention(12, 8, 512, 64, 32, causal) for causal in rules]
    found += [_attention(1, 2, length, block, D, "strict", window, with_sort=with_sort)
              for D, (block, length, window), with_sort in product((24, 32), (
                  (16, 144, 1), (16, 144, 3), (64, 250, 1), (64, 320, 1)), (True, False))]
    found += [_attention(1, 2, 1024, block, D, causal)
              for D, block, causal in product((24, 32), (256, 512), rules)]
    return [*found, _attention(1, 2, 256, 64, 20, "strict"), _attention(2, 2, 32, 32, 32),
            _attention(1, 2, 512, 64, 32, scale=-0.1), _attention(1, 2, 128, 128, 24, "inclusive"),
            _attention(1, 2, 4096, 64, 32, "strict"), _attention(10, 8, 512, 128, 32, "strict"),
            _attention(1, 2, 270, 64, 24, "inclusive"), _attention(1, 2, 300, 128, 32, "strict")]


def _long_blocks() -> list[Attention]:
    """Blocks of several pairs of tiles. Whole ones of 256 have ways of their own, forward and
    backward, and larger multiples of 128 have forward's; a short last block has weights, and with
    them, a mask or other sizes it is the general kernels' turn."""
    rules = ("none", "strict", "inclusive")
    found = [_attention(B, H, length, 256, D, causal)
             for (B, H, length, D), causal in product(((2, 2, 768, 64), (1, 3, 512, 40),
                                                       (2, 1, 256, 64), (1, 2, 700, 64)), rules)]
    found += [_attention(1, 2, 1024, 512, 64, causal) for causal in rules]
    return [*found, _attention(8, 8, 768, 256, 64, "strict"),  # more than a card's multiprocessors
            _attention(9, 5, 1024, 256, 64, "inclusive"),
            _attention(1, 2, 1280, 256, 56, "strict", scale=-0.1),
            _attention(1, 2, 768, 256, 64, "strict", 0, "holes"),
            _attention(1, 2, 1152, 384, 40, "strict"), _attention(1, 2, 960, 320, 64, "strict")]


def _sorting_blocks() -> list[Attention]:
    """For attention_fwd_sorting, which sorts as well: an even number of whole blocks of 64, which
    fill a cluster's CTAs or not; more heads than the card has clusters; and what is left to others:
    an odd number, 34 of them, a short last block."""
    rules = (("none", 0), ("strict", 0), ("inclusive", 0), ("strict", 1))
    found = [_attention(B, H, blocks * 64, 64, D, causal, window)
             for (blocks, B, H, D), (causal, window) in product((
                 (2, 2, 3, 64), (4, 1, 2, 40), (6, 2, 2, 64), (8, 1, 3, 56), (10, 1, 2, 64),
                 (14, 1, 2, 40), (16, 2, 2, 64), (18, 1, 2, 64), (26, 1, 1, 64), (32, 1, 2, 64)),
                 rules)]
    found += [_attention(B, 8, blocks * 64, 64, 64, causal, window)  # several heads a cluster
              for (B, blocks), (causal, window) in product(
                  ((80, 2), (50, 4), (25, 8), (14, 16), (7, 32)), (rules[0], rules[3]))]
    return [*found, _attention(1, 2, 512, 64, 64, scale=-0.1), _attention(2, 2, 320, 64, 64),
            _attention(1, 2, 34 * 64, 64, 64, "strict"), _attention(1, 2, 500, 64, 64, "strict"),
            _attention(1, 2, 1024, 64, 64, "inclusive", 0, "holes")]


ATTENTION_TILES = [*_attentions(), *_every_rule(), *MANY_BLOCKS, *_wide_pairs(),
                   *_narrow_tiles(), *_long_blocks(), *_sorting_blocks()]


def _few_blocks() -> list[Attention]:
    """Heads of 1 to 9 blocks and odd numbers of them, of more and fewer columns than a tile."""
    rules = cycle([("none", "concat", 0), ("strict", "concat", 0), ("inclusive", "outputs", 0),
                   ("strict", "concat", 1), ("none", "logits", 0)])
    masks, heads = cycle(MASKS), cycle(((3, 1), (1, 5), (7, 1), (1, 3)))
    sizes = cycle(((16, 64), (24, 40), (64, 64), (5, 8), (64, 128)))
    found = []
    for blocks, short in product(range(1, 10), (False, True)):
        (B, H), (block, D), (causal, combine, window) = next(heads), next(sizes), next(rules)
        length = blocks * block - (block // 3 if short else 0)
        found.append(Attention(causal, combine, window, next(masks), True, B, H, length, block, D))
    return found


FEW_BLOCKS = _few_blocks()


def _sortcuts() -> list[Sortcut]:
    masks, budgets, queries = cycle(MASKS), cycle((1, 2, 3)), cycle((1, 63, 130, 257))
    found = []
    for D, block in product(WIDTHS, (1, 8, 32, 64, 100, 128)):
        length = _ragged(block)
        budget = min(next(budgets), -(-length // block))
        found.append(Sortcut(budget, next(masks), 1, 2, next(queries), length, block, D))
    return found + [Sortcut(2, "none", 1, 2, 1024, 1024, 64, 64),
                    Sortcut(2, "right", 1, 1, 4096, 4096, 64, 64),
                    Sortcut(7, "none", 1, 2, 300, 500, 32, 64),
                    Sortcut(3, "none", 3, 1, 70, 110, 16, 64),
                    Sortcut(5, "holes", 1, 3, 70, 250, 32, 40),
                    Sortcut(1, "none", 2, 2, 130, 448, 64, 40),
                    Sortcut(5, "none", 1, 2, 1000, 520, 8, 64),
                    Sortcut(8, "none", 3, 8, 257, 1040, 16, 64),
                    Sortcut(2, "none", 40, 8, 100, 128, 64, 64),
                    Sortcut(130, "none", 1, 1, 40, 2080, 16, 64),
                    Sortcut(2, "none", 1, 1, 700, 650, 50, 64),
                    Sortcut(2, "none", 1, 1, 2000, 32768, 32, 64),
                    Sortcut(1, "none", 1, 1, 300, 600, 256, 256)]


def _zero_rows() -> list[Case]:
    """Rows of the sort that are all zeros, through every kernel that sorts and that attends: heads
    of few, some, many and very many blocks; blocks of a part of a tile, a tile and more; widths,
    windows and combinations. Blocks are full and there is no mask: else there are weights."""
    rules = ("none", "strict", "inclusive")

    def one(length, block, D, causal="none", combine="concat", window=0, B=2, H=2):
        return Attention(causal, combine, window, "none", True, B, H, length, block, D,
                         zero_rows=True)

    found = [one(length, block, 64, causal) for (block, length), causal in product(
        ((1, 40), (5, 100), (16, 144), (32, 64), (64, 256), (128, 384), (256, 768), (300, 900),
         (512, 1024)), rules)]
    found += [one(length, block, D, causal) for D, (block, length), causal in product(
        (24, 128, 136, 256), ((16, 144), (64, 320)), rules)]
    found += [one(length, block, D, "strict", "concat", window)
              for D, (block, length, window) in product(
                  (32, 64, 128), ((64, 320, 1), (16, 144, 1), (16, 144, 3), (100, 400, 1)))]
    found += [one(256, 64, D, causal, combine) for D, causal, combine in product(
        (64, 128), ("none", "inclusive"), ("outputs", "logits"))]
    found += [one(1120, 16, 32, causal, H=1) for causal in rules]
    found += [one(2096, 16, 64, causal, B=1, H=1) for causal in rules]
    found += [one(512, 64, 64, causal, B=12, H=8) for causal in rules]
    found += [one(blocks * 64, 64, 64, causal, B=1) for blocks in (12, 16, 32) for causal in rules]
    cuts = [(1, 512, 64, 64), (2, 1024, 64, 64), (2, 1024, 64, 40), (7, 512, 32, 64),
            (12, 160, 8, 64), (3, 640, 64, 128), (40, 1120, 16, 64), (4, 1120, 16, 24),
            (3, 90, 30, 64)]
    return found + [Sortcut(budget, "none", 2, 2, 300, length, block, D, zero_rows=True)
                    for budget, length, block, D in cuts]


def _balances() -> list[Balance]:
    rules = cases.BALANCE_RULES
    found, turn = [], 0
    for N in BALANCE_SIZES:
        chosen = rules if N in (17, 64, 128) else [
            ("none", "full", 0), ("strict", "prefix", 0), ("strict", "prior", 1),
            ("inclusive", "prefix", 0), ("inclusive", "prior", 0)]
        B, H = (3, 2) if N <= 200 else (1, 2) if N <= 512 else (1, 1)
        for causal, columns, window in chosen:
            noise, masked = bool(turn & 1), N > 2 and bool(turn & 2)
            iterations = (5, 5, 1, 20, 5, 3, 0)[turn % 7] if N <= 200 else 5
            # exp of raw logits must stay within float16.
            temperature = (0.75, 1.0, 0.5)[turn % 3] if iterations else 1.0
            found.append(Balance(causal, columns, iterations, window, noise, masked, B, H, N,
                                 temperature))
            turn += 1
    return found


# As logits of size 32, which eager code divides by a power of 2 without rounding.
LARGE_LOGITS = [Balance(causal, "full", iterations, N=N, temperature=1 / 32)
                for N in (8, 64, 100)
                for causal, iterations in (("none", 5), ("none", 20), ("strict", 10))]


def _pools() -> list[Pool]:
    masks, widths = cycle(MASKS), cycle((1, 17, 64, 130, 512))
    return [Pool(mode, causal, next(masks), 2, _ragged(block), block, next(widths))
            for block, (mode, causal) in product((1, 5, 16, 64, 100, 256), cases.POOL_MODES)] + [
        Pool(mode, causal, "right", 1, 5000, 64, 64) for mode, causal in cases.POOL_MODES]


POOL_TILES, BALANCE_TILES, SORTCUT_TILES = _pools(), _balances(), _sortcuts()
TILES: list[Case] = [*POOL_TILES, *BALANCE_TILES, *LARGE_LOGITS, *ATTENTION_TILES, *FEW_BLOCKS,
                     *SORTCUT_TILES, *_zero_rows()]
