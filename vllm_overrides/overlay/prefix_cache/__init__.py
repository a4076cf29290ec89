"""Which KV blocks hold a prefix that may be reused: only blocks that a finished step has computed are ever found.

`heap_evictor` orders what may be given up, `allocator` and `block_manager` are what the seams in `vllm/core` subclass
stock with.
"""
