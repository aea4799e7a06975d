"""What `serve` needs beside its options: its socket and keys, the models of its tables, workers of other machines."""
