"""What single steps cost: forwards by width, the host's share, the memory's bandwidth. Compares no contenders."""
