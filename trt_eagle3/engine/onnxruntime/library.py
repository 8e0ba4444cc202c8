"""ONNX Runtime without its telemetry: the one place that imports it.

Official builds send events to Microsoft, and keep a device id and a database in the user's cache
(``Microsoft/DeveloperTools/.onnxruntime``). The variable prevents all of that, if it is set before
the import. The call stops events where another part of the program imported the library first.
"""

from __future__ import annotations

import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime

__all__ = ["onnxruntime"]

onnxruntime.disable_telemetry_events()
