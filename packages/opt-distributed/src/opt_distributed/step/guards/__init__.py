"""Reasons for which every rank refuses a step: guards, with their sentences."""
