"""These tests need Megatron-Core installed; elsewhere a run over the whole repository leaves them out."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("megatron") else ["test_*.py"]
