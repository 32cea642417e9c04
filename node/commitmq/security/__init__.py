"""Who may do what: users, their policies, and the one function that decides (RocketMQ's ACL 2.0)."""
