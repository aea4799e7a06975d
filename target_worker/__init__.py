"""The target: checks guesses and adds one token of its own. Runs in its own process."""
