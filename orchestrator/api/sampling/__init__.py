"""What a caller may ask of a generation: its fields, their values and named sets of them."""
