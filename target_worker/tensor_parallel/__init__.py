"""A target divided among ranks: how they meet, the commands of rank 0, how a lost rank is noticed.

Only rank 0 knows requests; the other ranks run forwards.
"""
