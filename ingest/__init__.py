"""Documents in: bytes to text, text to chunks, chunks to vectors and KV, all of it into the catalogue."""
