"""From a raw log to a cache of columns."""
