"""Attention and cache kernels, as torch references and Triton kernels. They see tensors only."""
