"""The rules of message semantics: delay, timers, retry, transactions, POP. Pure: no socket, no file, no clock of their own."""
