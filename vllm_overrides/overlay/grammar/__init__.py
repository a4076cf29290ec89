"""Output that must follow a grammar, and thoughts that must end in time: what the engine does about it.

`constraint` is the plain description that travels with a request's SamplingParams. `compiler` turns its grammar into
a matcher, in a thread of the engine's process, and keeps the last ones; in the server's process it does so to find what
is none, and a `trial` in a process of its own finds what would end it. `waiting` holds requests until theirs is ready.
`follower` goes along with one sequence and says which tokens may come next; `step` applies that to the logits of a
step. `vocabulary` tells llguidance, the library behind all this, what the tokens are.

Composing grammars out of requests is the server's business (`vllm.overlay.serving.structured`).
"""
