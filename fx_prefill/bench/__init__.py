"""Measures a model's prefill: eager, torch.compile, replayed, and the floor of the same kernels."""
