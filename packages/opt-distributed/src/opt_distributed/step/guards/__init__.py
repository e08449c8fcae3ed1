"""Reasons for which every rank refuses a step: a guard in each file, with its sentence."""
