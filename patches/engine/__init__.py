"""The overlay engine: finds the installed vLLM, compares it with the pins, lays the overlay over it and takes it away again."""

VERSION = "1"
