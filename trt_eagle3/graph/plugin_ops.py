"""The attributes of the plugins' nodes, and the plugins' version."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["PLUGIN_VERSION", "plugin_attributes"]

PLUGIN_VERSION = "9"  # passed to the plugin library by plugins/capi/lists.h


def plugin_attributes(compute_type: int) -> Mapping[str, str | int]:
    """Return the attributes of every plugin node; ``compute_type``: of ``TensorProto``."""
    return {
        "plugin_version": PLUGIN_VERSION,
        "plugin_namespace": "",
        "compute_type": compute_type,
    }
