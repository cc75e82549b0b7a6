"""ZeRO's stages 1 and 2 in a plan: their buckets, and what is held when."""
