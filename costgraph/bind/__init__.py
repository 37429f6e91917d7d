"""Numbers for sizes: one binding, or arrays of them."""
