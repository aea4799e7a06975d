"""The default target: fetched once from the package index or the hub, then used without a network."""
