"""Several models behind one server: each in a pipeline of its own, loaded when a request names it."""
