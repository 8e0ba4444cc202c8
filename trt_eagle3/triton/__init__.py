"""Deploy to Triton Inference Server: write its model repository, and run the model in it."""
