"""What the three processes share: messages, bytes, sockets, trees, noise and memory. Imports nothing of ours."""
