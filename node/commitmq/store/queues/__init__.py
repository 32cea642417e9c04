"""ConsumeQueues of both kinds: their units, files, reading and filtering."""
