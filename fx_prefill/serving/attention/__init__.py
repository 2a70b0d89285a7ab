"""Attention with the live context: the operator, its backends, and how to add one."""
