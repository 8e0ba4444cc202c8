"""Import ONNX Runtime without its telemetry. Only this module imports it.

Official builds send events to Microsoft and keep a device id and a database in the user's cache
(``Microsoft/DeveloperTools/.onnxruntime``). The variable prevents that if it is set before the
import. The call stops events if the library was imported earlier.
"""

from __future__ import annotations

import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime

__all__ = ["onnxruntime"]

onnxruntime.disable_telemetry_events()
