"""Which of several models are in memory, and which requests wait for one. Pure: events and time in, commands out."""
