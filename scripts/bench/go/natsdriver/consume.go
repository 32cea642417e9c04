package main

import (
	"context"
	"fmt"
	"sync"

	"commitmq/bench/harness"

	"github.com/nats-io/nats.go/jetstream"
)

// messagesAhead is how many messages the client lets the server send before it looked at them.
const messagesAhead = 10_000

// consumer reads each stream with an ordered consumer, which needs no acks of single messages: a gap makes it begin
// again behind the last message it got.
type consumer struct {
	client  *client
	ordered []jetstream.Consumer
}

func (c *client) Consumer(onlyNew bool) (harness.Consumer, error) {
	result := &consumer{client: c}
	policy := jetstream.DeliverAllPolicy
	if onlyNew {
		policy = jetstream.DeliverNewPolicy
	}
	for _, name := range c.streams {
		config := jetstream.OrderedConsumerConfig{DeliverPolicy: policy}
		ordered, err := c.js.OrderedConsumer(context.Background(), name, config)
		if err != nil {
			return nil, fmt.Errorf("the stream %s cannot be read: %w", name, err)
		}
		result.ordered = append(result.ordered, ordered)
	}
	return result, nil
}

func (c *consumer) Each(take func(body []byte) bool) error {
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
		if !over && !take(message.Data()) {
			end(nil)
		}
	}
	failed := jetstream.ConsumeErrHandler(func(_ jetstream.ConsumeContext, err error) {
		mutex.Lock()
		defer mutex.Unlock()
		if !c.client.connection.IsConnected() {
			end(fmt.Errorf("the connection is lost: %w", err))
		}
	})
	for _, ordered := range c.ordered {
		running, err := ordered.Consume(handle, jetstream.PullMaxMessages(messagesAhead), failed)
		if err != nil {
			return err
		}
		defer running.Stop()
	}
	return <-done
}
