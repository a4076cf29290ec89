"""Which prefixes need not be computed again (docs/engine.md).

`coordinator` is what the scheduler calls. It joins the KV blocks (`allocator`, `block_manager` and `heap_evictor`, by
which the seams in `vllm/core` subclass stock) and the checkpoints of recurrent state (`policy`, `prefix_tree`,
`checkpoints`); `content_hash` is what both are known by. `sharing`: who waits for whom. `boundaries` come from who made
the prompt; `stats`, `metrics` and `reset` are for who looks at it from outside.
"""
