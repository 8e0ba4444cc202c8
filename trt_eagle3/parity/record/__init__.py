"""Record: the prompts, the engine's answers to them, and what its graphs were given and gave."""
