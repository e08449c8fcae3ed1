"""The update sweep of Adam and AdamW."""
