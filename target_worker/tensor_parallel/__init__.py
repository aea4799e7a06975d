"""A target divided among ranks: how they meet, what rank 0 tells the others, how a lost rank is noticed.

Only rank 0 knows requests; the others know forwards.
"""
