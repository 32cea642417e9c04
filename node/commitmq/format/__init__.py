"""The bytes of a store's structures, one module for each. No module here touches a file or a process."""
