"""ConsumeQueues of both kinds: units, files, reading and filtering."""
