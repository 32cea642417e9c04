package harness

// Connect makes a client with connections of its own. With create the topic is made if it is not there yet.
type Connect func(order *Order, create bool) (Client, error)

// Client is a connection to a system. Except for Send, which any number of goroutines may call, its methods are for one
// goroutine at a time.
type Client interface {
	// Send stores one message and returns when it is acknowledged.
	Send(queue int, body []byte) error
	// Stream returns a sender that does not wait for each message: at most window messages are sent and not yet
	// acknowledged, and the system may get them in portions of up to batch messages.
	Stream(window, batch int) Stream
	// Visible returns when the last message that this client got acknowledged can be read.
	Visible() error
	// Echo stores one message and reads it back.
	Echo(queue int, body []byte) error
	// Consumer returns a consumer of every queue that stands at their beginning or, with onlyNew, at their end.
	Consumer(onlyNew bool) (Consumer, error)
	// Close closes the connections.
	Close()
}

// Consumer reads what was sent before and waits for what comes.
type Consumer interface {
	// Each gives every message to take, in the order of its queue, until take returns false. A body is valid during the
	// call only. It is called once.
	Each(take func(body []byte) bool) error
}

// Stream sends messages one after another and gathers their acks.
type Stream interface {
	// Put sends a message, or keeps it until the portion is full; it waits when the window is full. The body is not
	// changed by the caller before Wait has returned.
	Put(queue int, body []byte)
	// Flush sends what was kept.
	Flush()
	// Wait flushes and returns when every message has its answer: how many failed, and the first failure.
	Wait() (int, error)
}
