"""The forms of the CPU kernels (baseline, AVX2, AVX-512): each is forced in a process of its own by
SINKHORN_CPU, and the tests marked each_form run there again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
NEEDS = {  # flags of /proc/cpuinfo, worst form first
    "baseline": set(),
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"},
}
USE_THE_LIBRARY = (
    "import support, torch; support.load_libraries(reference=False); "
    "torch.ops.sinkhorn.pool(torch.ones(1, 4, 1), 2, 'sum', False); "
    "print(torch.ops.sinkhorn.cpu_form())"
)


def cpu_flags() -> set[str]:
    line = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return set(line.group(1).split()) if line else set()


def supported(form: str) -> bool:
    return NEEDS[form] <= cpu_flags()


def run_python(*arguments: str, form: str | None) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "SINKHORN_CPU"}
    if form is not None:
        env["SINKHORN_CPU"] = form
    return subprocess.run([sys.executable, *arguments], cwd=HERE, env=env, capture_output=True,
                          text=True, timeout=900)


@pytest.mark.each_form
def test_the_active_form_is_the_one_asked_for():
    active = torch.ops.sinkhorn.cpu_form()
    assert active in NEEDS
    assert os.environ.get("SINKHORN_CPU", active) == active


@pytest.mark.parametrize("form", NEEDS)
def test_the_form_passes_the_checks_marked_each_form(form):
    if not supported(form):
        pytest.skip(f"this CPU lacks {' '.join(sorted(NEEDS[form] - cpu_flags()))}")
    done = run_python("-m", "pytest", "-q", "--tb=line", "-m", "each_form", "-k",
                      "not cuda", "-p", "no:cacheprovider", str(HERE), form=form)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = int(re.search(r"(\d+) passed", done.stdout).group(1))
    assert passed > 300, done.stdout[-500:]


def test_the_best_form_the_cpu_has_is_the_default():
    done = run_python("-c", USE_THE_LIBRARY, form=None)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == [form for form in NEEDS if supported(form)][-1]


@pytest.mark.parametrize("form", ["avx2", "avx512", "sse9"])
def test_a_form_that_is_unknown_or_that_the_cpu_lacks_is_an_error_not_a_crash(form):
    if form in NEEDS and supported(form):
        pytest.skip(f"this CPU has {form}")
    done = run_python("-c", USE_THE_LIBRARY, form=form)
    assert done.returncode == 1, f"exit code {done.returncode}: {done.stdout}{done.stderr[-2000:]}"
    assert "SINKHORN_CPU" in done.stderr and form in done.stderr
