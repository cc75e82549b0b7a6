"""From a batch to embeddings x_BMD: tables, numbers, buckets, the lift to one dimension."""
