"""Methods that build one context cache from stored chunks. Each method has its own file and sees tensors only."""
