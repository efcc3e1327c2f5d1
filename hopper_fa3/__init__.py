"""Exact attention for NVIDIA Hopper, kernels in Python (CuTe DSL)."""
