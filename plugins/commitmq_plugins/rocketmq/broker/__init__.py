"""The broker server: RocketMQ's requests, answered by the node's own processes."""
