"""Lists the public names of an installed torch, one a line: `python list_new_torch_names.py > names`.

tests/lint/newer_than_torch_2_1.txt is the difference of two such lists: what the torch of this repository's lock has
and 2.1.0 has not (`comm -13 <(old) <(new)`, both sorted in the C locale). Tensor methods stand as `.name`; `.index`
is left out by hand, because every list has it too.
"""
import torch
import torch.distributed
import torch.nn.functional

MODULES = ["torch", "torch.nn", "torch.nn.functional", "torch.distributed", "torch.linalg", "torch.cuda", "torch.cpu",
           "torch.library", "torch.utils", "torch.backends", "torch.special", "torch.fft", "torch.nn.init", "torch.amp",
           "torch.autograd", "torch.random", "torch.testing", "torch.version", "torch.compiler"]


def names() -> set[str]:
    found = {f".{name}" for name in dir(torch.Tensor) if not name.startswith("_")}
    for dotted in MODULES:
        module = torch
        for part in dotted.split(".")[1:]:
            module = getattr(module, part, None)
        found |= {f"{dotted}.{name}" for name in dir(module) if module is not None and not name.startswith("_")}
    return found


if __name__ == "__main__":
    print("\n".join(sorted(names())))
