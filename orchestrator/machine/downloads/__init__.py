"""What is fetched once and then used without a network: the default target, and environments of other software."""
