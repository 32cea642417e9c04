"""The processes around the workers: keeper, supervisor, forkserver; and the code that ``commitmq start`` and ``status``
share.
"""
