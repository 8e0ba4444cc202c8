"""Target families, one folder each; ``registry`` finds them."""
