"""``commitmq rocketmq doctor``: connects to a cluster of RocketMQ's protocol as a client does, and says what works."""
