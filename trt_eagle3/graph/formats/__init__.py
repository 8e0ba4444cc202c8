"""Weight formats, one file each: how stored numbers become values."""
