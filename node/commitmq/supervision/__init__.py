"""The processes around the workers: keeper, supervisor, forkserver, and what ``commitmq start`` and ``status`` ask of them."""
