"""depth_attention(): softmax attention over depth. Validates, chooses a backend, calls it."""

from attention_residuals.depth_attention.dispatch import available_backends, depth_attention

__all__ = ["available_backends", "depth_attention"]
