"""Other software's own decoding loops in the bench, each in an environment and a process of its own."""
