"""Integer geometry: axis-aligned blocks of a global tensor."""
