"""Files of checkpoints and their descriptions, without communication."""
