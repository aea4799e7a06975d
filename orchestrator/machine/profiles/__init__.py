"""Device profiles: how long forwards take on a device. From files, and derived from facts about Macs."""
