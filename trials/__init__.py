"""The life of one trial: records, data, plans, training, processes, the ledger."""
