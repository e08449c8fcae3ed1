"""Bytes on disk and what describes them; no collectives."""
