"""Which target and which draft fit together and into this machine's memory."""
