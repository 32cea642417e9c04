package main

import (
	"context"
	"fmt"
	"sync"

	"github.com/nats-io/nats.go/jetstream"
)

// Consume reads every stream with an ordered consumer, which needs no acks of each message: a gap makes it begin again
// behind the last message it got.
func (c *client) Consume(each func(body []byte) bool) error {
	var mutex sync.Mutex
	done := make(chan error, 1)
	over := false
	end := func(err error) {
		if !over {
			over = true
			done <- err
		}
	}
	handle := func(message jetstream.Msg) {
		mutex.Lock()
		defer mutex.Unlock()
		if !over && !each(message.Data()) {
			end(nil)
		}
	}
	failed := jetstream.ConsumeErrHandler(func(_ jetstream.ConsumeContext, err error) {
		mutex.Lock()
		defer mutex.Unlock()
		if !c.connection.IsConnected() {
			end(fmt.Errorf("the connection is lost: %w", err))
		}
	})
	for _, name := range c.streams {
		consumer, err := c.js.OrderedConsumer(context.Background(), name, jetstream.OrderedConsumerConfig{})
		if err != nil {
			return fmt.Errorf("the stream %s cannot be read: %w", name, err)
		}
		context, err := consumer.Consume(handle, jetstream.PullMaxMessages(messagesAhead), failed)
		if err != nil {
			return fmt.Errorf("the stream %s cannot be read: %w", name, err)
		}
		defer context.Stop()
	}
	return <-done
}

// messagesAhead is how many messages the client lets the server send before it looked at them.
const messagesAhead = 10_000
