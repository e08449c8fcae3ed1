"""The plan: which rank updates what, decided and checked before anything is built."""
