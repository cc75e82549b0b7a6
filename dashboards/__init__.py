"""Pictures of records: figures, the report, tables in the terminal, findings in words."""
