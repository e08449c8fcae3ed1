"""Build what a plan describes."""
