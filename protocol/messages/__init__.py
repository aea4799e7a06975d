"""Every message that crosses a process border, one struct each, with bounds on every field.

A frame is decoded against the one union that its direction allows. Nothing here knows sockets, models or clocks.
"""
