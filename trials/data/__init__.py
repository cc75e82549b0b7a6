"""The log: from raw click logs to a memory-mapped columnar cache that every trial reuses.

    raw files --sources, readers--> raw batches --typing--> typed batches --staging--> disk
    staged batches --splits, fit--> Encoding --write--> cache (PreparedLog, Split) --loader--> Batch

`prepare.prepare_log` runs it all; `encode_rows` is the short way from raw files to a model's inputs.
Only `loader` imports torch.
"""
