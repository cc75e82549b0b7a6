"""What is said of winners once selection is frozen: retrained from fresh seeds, compared, ablated, sliced."""
