"""How many stored chunks become one context cache: one method a file, tensors only."""
