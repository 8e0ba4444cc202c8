"""Target families: what is a family's own, in one folder each; ``registry`` finds them."""
