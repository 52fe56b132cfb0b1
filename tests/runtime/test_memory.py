"""Host memory that a comparison has freed is the host's again."""

import subprocess
import sys

SCRIPT = """
import torch
from weft.runtime import memory

def resident():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmRSS"))

def work():
    tensors = [torch.ones(4 << 18) for _ in range(100)]  # 4 MB each
    small = [torch.ones(1000) for _ in range(20_000)]  # 80 MB, with one that stays on top
    return small[-1]

memory.keep()
before = resident()
if {inside}:
    with memory.given_back():
        stays = work()
else:
    stays = work()
print(resident() - before)
again = torch.ones(4 << 18)
del again
print(torch.empty(4 << 18).data_ptr() != 0 and memory._chosen)
"""


def grown(inside: bool) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(inside=inside)], capture_output=True, text=True, timeout=60, check=True)
    grown, chosen = done.stdout.splitlines()
    assert chosen == str([-1, 32 << 20])  # what was chosen for good holds again
    return int(grown)


def test_what_a_comparison_frees_is_given_back():
    assert grown(inside=False) > 200 << 20
    assert grown(inside=True) < 40 << 20
