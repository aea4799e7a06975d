"""Trains the shipped draft in torch, which the extra `training` installs: see `chat_draft`."""
