"""The choice among a ladder's strategies: what has to be priced for it, and what cannot be taken in any case."""
