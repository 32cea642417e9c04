"""The ``commitmq`` command: click, one module per verb, imported only when that verb is used."""
