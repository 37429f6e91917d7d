"""A graph in other dtypes, as autocast chooses them."""
