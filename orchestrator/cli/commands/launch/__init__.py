"""`launch-pipeline launch`: programs of others, and the server that they ask, found or started for them."""
