"""Which tree the next step drafts: goodput, measured costs, measured acceptance."""
