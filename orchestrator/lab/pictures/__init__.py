"""The pictures of the documentation, made from a real pipeline at work. Users do not need it."""
