"""KV of finished turns in files of this user's cache folder, which a later start can use."""
