"""RocketMQ's remoting protocol: frames, headers, bodies and a server for them.

``frame`` reads and writes frames, ``headers`` are the typed fields of requests and answers, ``bodies`` their JSON bodies.
``server`` moves frames over TCP; everything else has no socket.
"""
