"""Other formats, in and out; one process."""
