"""Attention back ends that stand on this project's own operators."""
