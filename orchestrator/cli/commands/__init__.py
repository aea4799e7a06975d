"""One file a command: options in, a call of the layer below, text out."""
