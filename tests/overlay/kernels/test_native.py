"""The compiled operators and the process they are loaded into."""
import subprocess
import sys

# Its wheel brings an OpenMP runtime, whose folder's name sorts before torch's.
TEAMS = """
import os
import sentencepiece
import torch
from vllm.overlay.kernels.linear import native
torch.set_num_threads(2)
threads = lambda: len(os.listdir("/proc/self/task"))
x, weight = torch.ones(4, 512), torch.ones(1024, 512)
torch.exp(torch.ones(1 << 20))
before = threads()
assert torch.equal(native.linear(x, weight, None), torch.full((4, 1024), 512.0))
print(before, threads())
"""


def test_torchs_team_of_threads_is_used_whatever_other_runtimes_are_loaded():
    done = subprocess.run([sys.executable, "-c", TEAMS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.split()[-2:]
    assert after == before, f"{before} threads when torch had its team, {after} after a native operator"
