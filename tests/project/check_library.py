"""What libsinkhorn.so may need, and that no instruction set leaks out of its kernels.

Inline functions compiled for AVX must not be shared with the rest: the linker keeps one copy of each,
and it would crash an older processor. So every weak symbol of an instruction set's objects must carry
that set's namespace.
"""

import re
import subprocess
import sys
from pathlib import Path

build = Path(sys.argv[1])
problems: list[str] = []


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


needed = re.findall(r"\(NEEDED\).*\[(.*?)\]", output("readelf", "-d", str(build / "libsinkhorn.so")))
ALLOWED = re.compile(
    r"^(libtorch_cpu|libc10|libtorch_cuda|libc10_cuda|libcudart|libgomp|libstdc\+\+|libgcc_s|libm|libc|"
    r"libpthread|ld-linux-x86-64)\.so")
for name in needed:
    if not ALLOWED.match(name):
        problems.append(f"libsinkhorn.so needs {name}: Torch (and CUDA) only")
if not any(name.startswith("libtorch_cpu") for name in needed):
    problems.append(f"libsinkhorn.so does not name libtorch_cpu among {needed}")

own = output("nm", "-DC", "--defined-only", str(build / "libsinkhorn.so"))
if "std::ctype<char>::do_toupper" in own:
    problems.append("libsinkhorn.so carries its own copy of the C++ standard library")

for isa in ("avx2", "avx512"):
    objects = sorted(build.glob(f"CMakeFiles/sinkhorn_kernels_{isa}.dir/**/*.o"))
    if not objects:
        problems.append(f"no objects of {isa} in {build}")
    for path in objects:
        for line in output("nm", "-C", str(path)).splitlines():
            match = re.match(r"[0-9a-f ]{16} ([WVu]) (.*)", line)
            shared = match and f"sinkhorn::cpu::{isa}::" not in match.group(2)
            if shared and not match.group(2).startswith("DW.ref."):  # a pointer, not code
                problems.append(f"{path.name} of {isa} shares {match.group(2)}")

print("\n".join(problems) or f"needs {', '.join(needed)}; no shared symbols")
sys.exit(1 if problems else 0)
