"""Reads and cuts the FX graph; knows nothing of CUDA."""
