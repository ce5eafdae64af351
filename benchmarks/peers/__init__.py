"""Other engines beside ragkv, on the same model shape, in the same run. A peer runs in an environment of its own."""
