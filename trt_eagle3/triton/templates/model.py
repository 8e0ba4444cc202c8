"""The model is in trt_eagle3, in the Python environment that the server runs this with."""

from trt_eagle3.triton.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
