"""Checks of what stands between backward and the next step (note_gradients, adam_step, copy_all), for any
device. fused_checks.py runs them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from support import randn, rms, rms_error

ops = torch.ops.sinkhorn

# Odd sizes, none at all, pieces of several blocks with short ends; the many are more than one launch.
SIZES = [(1,), (3,), (0,), (4,), (7, 5), (128,), (33, 129), (300, 259), (2048,), (2049,), (4096, 5), ()]
MANY = [(1 + i % 37,) for i in range(400)]
BETA1, BETA2, EPSILON = 0.9, 0.98, 1e-8


def _tensors(sizes: list[tuple[int, ...]], device: str, seed: int, scale: float = 1.0) -> list[Tensor]:
    return [scale * randn(math.prod(size), seed=1000 * seed + i, dtype=torch.float32,
                          device=device).view(size) for i, size in enumerate(sizes)]


def _odd(tensors: list[Tensor]) -> list[Tensor]:
    """The same values; matrices lie transposed, vectors where nothing is aligned."""
    def odd(x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x.T.contiguous().T
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    return [odd(x) for x in tensors]


# --- the note of a step ------------------------------------------------------------------------------


class Notes:
    def __init__(self, device: str) -> None:
        self.record = torch.tensor([0, 0, -1, 0], device=device)
        self.sums = torch.zeros(2, device=device)

    def add(self, gradients: list[Tensor], loss: float, clip: float = 0.0) -> float:
        scalar = torch.tensor(loss, device=self.sums.device)
        divisor = ops.note_gradients(gradients, scalar, clip, self.record, self.sums)
        return divisor.item()

    def failure(self) -> tuple[int, int]:
        assert self.record[3] == 0, "the kernel leaves its counter at 0"
        return self.record[1].item(), self.record[2].item()


def norms_and_clipping(device: str) -> None:
    tolerance = 1e-5 if device == "cuda" else 2e-4  # Torch's own sums on the CPU are long ones
    for sizes in (SIZES, MANY, [(3_000_001,), (5,)], [(0,)]):
        gradients = _tensors(sizes, device, seed=1)
        norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients))
        notes = Notes(device)
        assert notes.add(gradients, 2.0) == 1.0, "no clipping"
        assert notes.add(gradients, 0.5, clip=2 * norm + 1) == 1.0, "a small norm"
        clipped = notes.add(_odd(gradients), 0.25, clip=norm / 3 + 1e-3)
        assert math.isclose(clipped, max(1.0, (norm + 1e-6) / (norm / 3 + 1e-3)), rel_tol=tolerance)
        assert notes.record[0] == 3 and notes.failure() == (0, -1)
        assert notes.sums[0] == 2.75
        assert math.isclose(notes.sums[1].item(), 3 * norm, rel_tol=tolerance, abs_tol=1e-12)
        again = Notes(device), Notes(device)
        for other in again:
            other.add(gradients, 0.0)
        assert torch.equal(again[0].sums, again[1].sums), "repeated"


def failures_are_noted_once(device: str) -> None:
    for sizes in (SIZES, MANY):
        fine = _tensors(sizes, device, seed=1)
        last = len(sizes) - 1
        for bad, value in ((0, math.nan), (6 if sizes is SIZES else 250, math.inf), (last, -math.inf)):
            wrong = [g.clone() for g in fine]
            wrong[bad].view(-1)[-1] = value
            wrong[last].view(-1)[0] = value  # only the first counts
            notes = Notes(device)
            notes.add(fine, 1.0, clip=1.0)
            divisor = notes.add(wrong, 1.0, clip=1.0)
            assert math.isnan(divisor), "clipping hides nothing"
            assert notes.failure() == (2, bad), (notes.failure(), bad)
            wrong = [g * math.nan for g in fine]
            notes.add(wrong, math.nan)
            assert notes.failure() == (2, bad), "the first failure stays"
            before = notes.sums.clone()
            assert math.isnan(notes.add(fine, 1.0)), "nothing is done any more"
            assert notes.sums.isfinite().all() and torch.equal(notes.sums, before)
            assert notes.record[0] == 4
        for loss in (math.nan, math.inf):
            notes = Notes(device)
            assert math.isnan(notes.add(fine, loss))
            assert notes.failure() == (1, -1), "the loss alone"
            notes = Notes(device)
            notes.add([g * math.nan for g in fine], loss)
            assert notes.failure() == (1, -1), "the loss spoils every gradient"
        notes = Notes(device)
        notes.record[0] = 41
        notes.add([g * math.nan for g in fine], 1.0)
        assert notes.failure() == (42, sizes.index(next(s for s in sizes if math.prod(s))))


# --- Adam --------------------------------------------------------------------------------------------


class Optimized:
    """Parameters and moments in a type, from the same values."""

    def __init__(self, sizes: list[tuple[int, ...]], device: str, dtype: torch.dtype) -> None:
        self.parameters = [x.to(dtype) for x in _tensors(sizes, device, seed=1)]
        self.exp_avgs = [torch.zeros_like(x) for x in self.parameters]
        self.exp_avg_sqs = [torch.zeros_like(x) for x in self.parameters]
        self.steps = [torch.full((), 3.0 * (i % 2), device=device) for i in range(len(sizes))]
        self.decays = [0.1 * (i % 3 == 0) for i in range(len(sizes))]
        self.arrived = torch.zeros(1, dtype=torch.int32, device=device)

    def fused(self, gradients: list[Tensor], rate: Tensor, divisor: Tensor | None) -> bool:
        return ops.adam_step(self.parameters, gradients, self.exp_avgs, self.exp_avg_sqs, self.steps,
                             self.decays, rate, divisor, BETA1, BETA2, EPSILON, self.arrived)

    def plain(self, gradients: list[Tensor], rate: Tensor, divisor: Tensor | None) -> None:
        """The formula, betas rounded as they are for the kernels."""
        one, two = (torch.tensor(b).item() for b in (BETA1, BETA2))
        for i, p in enumerate(self.parameters):
            g, m, v = gradients[i].to(p.dtype), self.exp_avgs[i], self.exp_avg_sqs[i]
            g = g if divisor is None else g / divisor.to(p.dtype)
            self.steps[i] += 1
            t = self.steps[i].item()
            p -= rate.item() * self.decays[i] * p
            m.copy_(one * m + (1 - one) * g)
            v.copy_(two * v + (1 - two) * g * g)
            p -= rate.item() / (1 - one**t) * m / (v.sqrt() / math.sqrt(1 - two**t) + EPSILON)

    def values(self) -> list[Tensor]:
        return [*self.parameters, *self.exp_avgs, *self.exp_avg_sqs]

    def joined(self) -> list[Tensor]:
        return [torch.cat([x.flatten() for x in kind])
                for kind in (self.parameters, self.exp_avgs, self.exp_avg_sqs)]


def adam_follows_the_formula(device: str) -> None:
    for sizes in (SIZES, MANY):
        for divided in (False, True):
            ours, again = (Optimized(sizes, device, torch.float32) for _ in range(2))
            eager = Optimized(sizes, device, torch.float32)
            truth = Optimized(sizes, device, torch.float64)
            for step in range(4):
                gradients = _tensors(sizes, device, seed=10 + step, scale=10.0 ** -step)
                rate = torch.tensor(0.01 / (1 + step), device=device)
                divisor = torch.tensor(1.7, device=device) if divided else None
                if not ours.fused(_odd(gradients) if step == 2 else gradients, rate, divisor):
                    assert device == "cpu", "there is a kernel for these"
                    untouched = Optimized(sizes, device, torch.float32)
                    assert all(torch.equal(a, b) for a, b in zip(ours.values(), untouched.values()))
                    return
                again.fused(gradients, rate, divisor)
                eager.plain(gradients, rate, divisor)
                truth.plain(gradients, rate, divisor)
            assert ours.arrived == 0 and all(torch.equal(a, b) for a, b in zip(ours.steps, truth.steps))
            assert all(torch.equal(a, b) for a, b in zip(ours.values(), again.values())), "repeated"
            for a, b, exact in zip(ours.joined(), eager.joined(), truth.joined()):
                floor = 2 * torch.finfo(torch.float32).eps * rms(exact)
                assert rms_error(a, exact) <= 2 * rms_error(b, exact) + floor, rms_error(a, exact)


def adam_agrees_with_torch(device: str) -> None:
    ours, theirs = (Optimized(SIZES[:2] + SIZES[3:], device, torch.float32) for _ in range(2))
    for step in range(3):
        gradients = _tensors(SIZES[:2] + SIZES[3:], device, seed=20 + step)
        rate, divisor = torch.tensor(0.02, device=device), torch.tensor(1.25, device=device)
        if not ours.fused(gradients, rate, divisor):
            return
        torch._foreach_add_(theirs.steps, 1)
        for decay in (0.0, 0.1):
            lists = [[x for x, d in zip(y, theirs.decays) if d == decay] for y in (
                theirs.parameters, [g.clone() for g in gradients], theirs.exp_avgs, theirs.exp_avg_sqs)]
            steps = [x for x, d in zip(theirs.steps, theirs.decays) if d == decay]
            torch._fused_adamw_(*lists, [], steps, lr=rate, beta1=BETA1, beta2=BETA2,
                                weight_decay=decay, eps=EPSILON, amsgrad=False, maximize=False,
                                grad_scale=divisor)
    for a, b in zip(ours.values(), theirs.values()):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def adam_spreads_what_is_not_finite(device: str) -> None:
    x = Optimized([(9,)], device, torch.float32)
    gradient = torch.ones(9, device=device)
    gradient[8], gradient[1] = math.nan, math.inf
    if x.fused([gradient], torch.tensor(0.1, device=device), None):
        fine = x.parameters[0].isfinite().tolist()
        assert fine == [True, False, *[True] * 6, False], fine


def a_divisor_that_is_no_number_holds_everything(device: str) -> None:
    ours, untouched = (Optimized(SIZES, device, torch.float32) for _ in range(2))
    gradients = [g * math.nan for g in _tensors(SIZES, device, seed=10)]
    ours.fused(gradients, torch.tensor(0.1, device=device), torch.tensor(math.nan, device=device))
    assert ours.arrived == 0
    for a, b in zip([*ours.values(), *ours.steps], [*untouched.values(), *untouched.steps]):
        assert torch.equal(a, b)


# --- copies ------------------------------------------------------------------------------------------


def copies_round_like_torch(device: str) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for sizes in (SIZES, MANY):
            source = _tensors(sizes, device, seed=1, scale=100.0)
            for given in (source, _odd(source)):
                copies = [torch.full_like(x, math.nan, dtype=dtype) for x in source]
                ops.copy_all(copies, given)
                assert all(torch.equal(a, b.to(dtype)) for a, b in zip(copies, source)), dtype


def graph_holds_a_whole_step(device: str) -> None:
    """Captured once, replayed with other gradients: what plain calls give, to the bit."""
    def state() -> tuple[Optimized, Notes, list[Tensor]]:
        x = Optimized(MANY, device, torch.float32)
        return x, Notes(device), [torch.zeros_like(p, dtype=torch.bfloat16) for p in x.parameters]

    gradients = _tensors(MANY, device, seed=2)
    rate, loss = torch.tensor(0.01, device=device), torch.tensor(1.5, device=device)

    def step(x: Optimized, notes: Notes, copies: list[Tensor]) -> None:
        divisor = ops.note_gradients(gradients, loss, 0.5, notes.record, notes.sums)
        assert x.fused(gradients, rate, divisor)
        ops.copy_all(copies, x.parameters)

    captured, plain = state(), state()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*captured)
    for i in range(3):
        for g, new in zip(gradients, _tensors(MANY, device, seed=30 + i)):
            g.copy_(new)
        rate.fill_(0.01 * (i + 1))
        graph.replay()
        step(*plain)
    (a, notes_a, copies_a), (b, notes_b, copies_b) = captured, plain
    assert notes_a.record.tolist() == notes_b.record.tolist() == [3, 0, -1, 0]
    assert torch.equal(notes_a.sums, notes_b.sums)
    for x, y in zip([*a.values(), *a.steps, *copies_a], [*b.values(), *b.steps, *copies_b]):
        assert torch.equal(x, y)


def a_step_of_ours(device: str) -> None:
    """All three, nothing beside them: the same bits again, and all that they write is finite."""
    for sizes in (SIZES, MANY):
        results = []
        for _ in range(2):
            x, notes = Optimized(sizes, device, torch.float32), Notes(device)
            gradients = _tensors(sizes, device, seed=2)
            divisor = ops.note_gradients(gradients, torch.tensor(1.0, device=device), 0.5,
                                         notes.record, notes.sums)
            if not x.fused(gradients, torch.tensor(0.01, device=device), divisor):
                assert device == "cpu", "there is a kernel for these"
            copies = [torch.empty_like(p, dtype=torch.bfloat16) for p in x.parameters]
            ops.copy_all(copies, x.parameters)
            results.append([y.cpu() for y in (*x.values(), *x.steps, *copies, notes.sums)])
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*results))


CHECKS = [norms_and_clipping, a_step_of_ours, failures_are_noted_once, adam_follows_the_formula,
          adam_agrees_with_torch, adam_spreads_what_is_not_finite,
          a_divisor_that_is_no_number_holds_everything, copies_round_like_torch]
