"""Measures how fast this machine reads memory: sums of a large buffer, on all threads that torch has.

    OMP_NUM_THREADS=2 python worklogs/peers/read_rate.py [--gib 1] [--times 12]

Prints JSON: {"threads", "bytes", "bytes_per_s": one for each time}. The best is what the machine can do; a sum may be
slower than that, never faster.
"""
import argparse
import json
import time

import torch


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="of the buffer (default: %(default)s)")
    parser.add_argument("--times", type=int, default=12, help="default: %(default)s")
    options = parser.parse_args()
    buffer = torch.ones(int(options.gib * 2**28), dtype=torch.float32)
    size = buffer.numel() * buffer.element_size()
    buffer.sum()
    found = []
    for _ in range(options.times):
        start = time.perf_counter()
        buffer.sum()
        found.append(round(size / (time.perf_counter() - start)))
    print(json.dumps({"threads": torch.get_num_threads(), "bytes": size, "bytes_per_s": found}))


if __name__ == "__main__":
    main()
