// natsdriver carries out the benchmark's works with NATS JetStream and nats.go, the client of the server's makers.
//
// Up to streamsAtMost queues are a stream each. More of them are subjects of one stream, which is what NATS is made
// for: a stream has files, memory and goroutines of its own in the server, a subject has an index entry.
package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"commitmq/bench/harness"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

func main() { harness.Main("nats.go "+nats.Version, connect) }

const (
	streamsAtMost  = 100
	requestTimeout = time.Minute
)

// client is one connection, which goroutines share as nats.go recommends.
type client struct {
	connection *nats.Conn
	js         jetstream.JetStream
	acks       *acks
	streams    []string // names, one a queue, or one only
	subjects   []string // one a queue
	sharers    int      // clients that publish to the same streams
	last       position // of the last acknowledged message
}

type position struct {
	stream   string
	sequence uint64
}

func connect(order *harness.Order, create bool) (harness.Client, error) {
	connection, err := nats.Connect("nats://"+order.Address, nats.NoReconnect(), nats.Timeout(5*time.Second))
	if err != nil {
		return nil, err
	}
	c := &client{connection: connection, acks: newAcks(), sharers: order.Clients}
	c.js, err = jetstream.New(connection,
		jetstream.WithPublishAsyncMaxPending(1<<20), // the window is kept by acks
		jetstream.WithPublishAsyncAckHandler(c.acks.arrived),
		jetstream.WithPublishAsyncErrHandler(c.acks.failed),
		jetstream.WithDefaultTimeout(requestTimeout))
	if err != nil {
		connection.Close()
		return nil, err
	}
	for queue := range order.Queues {
		c.subjects = append(c.subjects, fmt.Sprintf("%s.%d", order.Topic, queue))
	}
	if order.Queues > streamsAtMost {
		c.streams = []string{order.Topic}
	} else {
		for queue := range order.Queues {
			c.streams = append(c.streams, fmt.Sprintf("%s-%d", order.Topic, queue))
		}
	}
	if create {
		err = c.create(order.Topic)
	}
	if err != nil {
		connection.Close()
		return nil, err
	}
	return c, nil
}

// create makes the streams that are not there. They keep everything, in files.
func (c *client) create(topic string) error {
	for number, name := range c.streams {
		subjects := c.subjects[number : number+1]
		if len(c.streams) < len(c.subjects) {
			subjects = []string{topic + ".*"}
		}
		_, err := c.js.CreateStream(context.Background(), jetstream.StreamConfig{
			Name: name, Subjects: subjects, Storage: jetstream.FileStorage, Replicas: 1, AllowDirect: true,
		})
		if err != nil && !errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
			return fmt.Errorf("the stream %s could not be made: %w", name, err)
		}
	}
	return nil
}

func (c *client) Close() { c.connection.Close() }

func (c *client) Send(queue int, body []byte) error {
	_, err := c.js.Publish(context.Background(), c.subjects[queue], body)
	return err
}

func (c *client) Echo(queue int, body []byte) error {
	ack, err := c.js.Publish(context.Background(), c.subjects[queue], body)
	if err != nil {
		return err
	}
	c.last = position{ack.Stream, ack.Sequence}
	return c.Visible()
}

func (c *client) Visible() error {
	if c.last.stream == "" {
		return errors.New("nothing was acknowledged")
	}
	stream, err := c.js.Stream(context.Background(), c.last.stream)
	if err != nil {
		return err
	}
	_, err = stream.GetMsg(context.Background(), c.last.sequence)
	return err
}
