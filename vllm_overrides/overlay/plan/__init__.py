"""How much memory a hybrid model takes on one rank, counted from its configuration: before weights are loaded, and
without a device (`python -m vllm.overlay.plan --help`).

`weights` counts parameters, `workspace` what a step needs beside them, `memory` puts both against what there is, and
`engine` asks it all of a worker's configuration. docs/memory.md has the rules and where the numbers come from.
"""
