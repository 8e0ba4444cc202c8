"""Triton Inference Server: the model repository that `deploy` writes, and the model that the
server runs from it.
"""
