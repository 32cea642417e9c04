"""``Consumer.run``: messages are passed to a handler, as RocketMQ's push consumer does it.

The modules, from the inside out:

* :mod:`consume_result`: what a handler says of a message; :mod:`backoff`, :mod:`settings`: the arguments of ``run``;
* :mod:`process_queue`: the messages of one queue that are not done (RocketMQ's ProcessQueue); :mod:`backlog`: those of
  all queues. Both are pure: the caller brings the clock and the lock;
* :mod:`send_back`: the node's operation ``send_back``; :mod:`engine`: the backlog with its lock, its counts and the
  thread that sends failed messages back;
* :mod:`threads` and :mod:`tasks`: who calls the handler; :mod:`chain`: the middleware around it;
* :mod:`run`: the loop that fetches, commits and stops. It runs where a program without ``run`` would poll.

A message is *unfinished* from the moment when a fetch returned it until it is done. It is done when the handler says
so, or when the node has acknowledged its send-back. These sentences hold; ``tests/unit/client/handling`` has a model of
them:

1. The committed offset of a queue is never above the offset of an unfinished message of it.
2. Every message is passed to a handler at least once before its queue's committed offset passes it.
3. In ordered mode the handlers of one queue run one at a time, in the order of the queue. The next message waits until
the
   one before it is done.
4. Two handlers never have the same message of one assignment at the same time.
5. A queue that was taken away starts no handler. What its running handlers say has no effect: the next owner gets their
   messages again.
6. A queue has no more unfinished messages, bytes and span of offsets than the limits, but for the message that passes a
   limit. A full queue does not keep other queues from being fetched.
7. Handlers never hold up heartbeats or fetching: the group's membership has a thread of its own, and the loop waits for
no
   handler before it stops.
8. A message whose send-back failed is tried again here. It stays unfinished in the meantime, so the offset waits.
9. After ``close`` no handler starts. ``run`` waits for those that run, at most ``stop_timeout_s``; then it commits and
leaves.
"""
