"""The decoder model: checkpoints, the layer loop, KV caches and prompt pieces."""
