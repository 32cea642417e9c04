"""The ``commitmq`` command: click, one module a verb, imported when that verb is used and not before."""
