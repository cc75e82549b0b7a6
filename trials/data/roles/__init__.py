"""What a column is for, judged from a sample of it (`rules`) and its name (`names`)."""
