"""How the tables of a ledger came to be, for Alembic."""
