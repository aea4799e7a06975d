"""Who may connect to the server, for how long and how often."""
