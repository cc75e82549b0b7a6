"""What a study may still do: its clock, what its stages are expected to take, what more candidates would gain."""
