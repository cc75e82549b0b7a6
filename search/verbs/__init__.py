"""The commands of `dhen-search`, one per file."""
