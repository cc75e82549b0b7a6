"""What stays on disk: the ledger, weights, the cache of the user."""
