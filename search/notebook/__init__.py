"""What `from search import ...` gives to notebooks: studies, bundles and plans as values that show themselves."""
