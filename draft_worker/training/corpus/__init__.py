"""The texts that a training reads: the target's answers, their states, and what is held out of them."""
