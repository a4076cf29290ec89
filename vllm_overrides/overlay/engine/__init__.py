"""What the engine does around a step: several samples of one prompt, seeds that survive preemption, a failed step."""
