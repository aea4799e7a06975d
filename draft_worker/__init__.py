"""The draft: guesses ahead. Runs in its own process."""
