"""The processes around the workers (keeper, supervisor, forkserver), and code of ``commitmq start`` and ``status``."""
