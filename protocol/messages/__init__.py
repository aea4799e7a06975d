"""Every message between processes, one struct each, with bounds on every field.

A frame is decoded into the one union that its direction allows. Knows no sockets, models or clocks.
"""
