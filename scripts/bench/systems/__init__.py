"""The systems that are compared: one module each, with a class that fulfils :class:`bench.system.System`."""
