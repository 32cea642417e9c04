"""The typed header fields of requests and answers, under RocketMQ's own class names (remoting 1.14).

A field that RocketMQ's class calls not-null is required here when its handler cannot do without it, and optional where
the handler answers a code of its own for it, or real clients leave it out.
"""
