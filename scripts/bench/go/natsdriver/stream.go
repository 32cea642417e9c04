package main

import (
	"sync"

	"commitmq/bench/harness"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// acks counts the answers to asynchronous publishes of one connection, and lets no more than a window be without one.
type acks struct {
	mutex   sync.Mutex
	changed *sync.Cond
	window  int
	open    int // published and not yet answered
	waiting bool
	last    position
	errors  int
	first   error
}

func newAcks() *acks {
	a := &acks{}
	a.changed = sync.NewCond(&a.mutex)
	return a
}

func (a *acks) arrived(_ jetstream.JetStream, _ *nats.Msg, ack *jetstream.PubAck) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.last = position{ack.Stream, ack.Sequence}
	a.answered()
}

func (a *acks) failed(_ jetstream.JetStream, _ *nats.Msg, err error) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.fail(err)
}

func (a *acks) fail(err error) {
	if a.errors++; a.first == nil {
		a.first = err
	}
	a.answered()
}

// answered makes room for another message. A publisher that met a full window goes on when an eighth of it is free: to
// wake it for every single ack would cost both sides more than it brings.
func (a *acks) answered() {
	a.open--
	if a.waiting && a.open <= a.window-max(1, a.window/8) {
		a.waiting = false
		a.changed.Signal()
	}
}

// enter waits until there is room in the window.
func (a *acks) enter() {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	if a.open >= a.window {
		a.await()
	}
	a.open++
}

// drain waits until everything is answered.
func (a *acks) drain() {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.window = 1
	if a.open > 0 {
		a.await()
	}
}

func (a *acks) await() {
	a.waiting = true
	for a.waiting {
		a.changed.Wait()
	}
}

// stream publishes asynchronously, the recommended way to publish fast. nats.go itself gathers what is published into
// large writes, so portions are not needed.
type stream struct{ client *client }

// Stream ignores batch: the window alone keeps the server busy.
func (c *client) Stream(window, _ int) harness.Stream {
	c.acks.window = max(1, min(window, serverQueue/c.sharers))
	return stream{c}
}

// serverQueue is less than the 10,000 messages that the server lets wait for a stream before it refuses more; the clients
// that publish to it share it.
const serverQueue = 8000

func (s stream) Put(queue int, body []byte) {
	s.client.acks.enter()
	if _, err := s.client.js.PublishAsync(s.client.subjects[queue], body); err != nil {
		s.client.acks.failed(nil, nil, err)
	}
}

// Flush has nothing to do: nats.go writes at once when nothing more is published.
func (s stream) Flush() {}

func (s stream) Wait() (int, error) {
	acks := s.client.acks
	acks.drain()
	s.client.last = acks.last
	return acks.errors, acks.first
}
