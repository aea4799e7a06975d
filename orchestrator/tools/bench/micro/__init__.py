"""Single steps measured alone, each in a process of its own."""
