"""What the hybrid models need beside the model file: registration, checkpoint loading, generation defaults."""
