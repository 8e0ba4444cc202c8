"""Load the model from trt_eagle3, in the Python environment that the server runs."""

from trt_eagle3.triton.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
