"""Record: the prompts, the engine's answers, and the inputs and outputs of its graphs."""
