"""Rules of message semantics: delay, timer, transaction, retry, POP. No module here has a socket, a file or a clock."""
