"""Block drafts: DFlash, DFlash2 and DSpark (``BlockManifest``)."""
