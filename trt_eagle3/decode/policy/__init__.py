"""Choose the tree of the next step by goodput, from measured costs and acceptance."""
