"""Hardware: device and network specifications, units, and result tables."""
