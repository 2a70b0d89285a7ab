"""The seam for engines with a scheduler and a KV cache of their own."""
