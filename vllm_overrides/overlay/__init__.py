"""Our own code, deployed as `vllm.overlay`: what the seams at stock paths call into."""
