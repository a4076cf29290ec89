"""The overlay engine: compares the installed vLLM with the pins, lays the overlay over it, takes it away again."""

VERSION = "1"
