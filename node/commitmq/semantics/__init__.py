"""The rules of message semantics: delay, retry, transactions. Pure: no socket, no file, no clock of their own."""
