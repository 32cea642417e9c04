"""The JSON bodies of requests and answers, one noun a module, under RocketMQ's own class names.

Each class has ``to_json`` (what :func:`..fastjson.dumps` takes), ``from_json`` (raises BodyError), or both, as the
server needs them.
"""
