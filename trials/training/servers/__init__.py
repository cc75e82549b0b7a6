"""Servers of embedding tables, and what ranks ask of them."""
