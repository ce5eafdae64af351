"""Faster execution of a model on a GPU: merged weights, the fused loop and CUDA graphs."""
