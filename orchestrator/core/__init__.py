"""The pure core: events and time in, commands out."""
