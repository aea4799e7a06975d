"""What the processes around Core ML tell one another: orders to convert and to examine, and their reports."""
