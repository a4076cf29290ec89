"""How stock vLLM is changed: the manifest, the engine that lays the overlay, and the edits. Standard library only."""
