// redisdriver carries out the benchmark's works with Redis streams: one stream a queue, one entry a message, the body
// in its only field.
//
// The client is rueidis, because it pipelines by itself what goroutines send at the same time over few connections,
// which the others (go-redis, redis-py) do for explicit pipelines only, with a connection for every caller. It was as fast
// as redis-benchmark, which is C, for one client, and twice as fast for 16 and 64.
package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"commitmq/bench/harness"

	"github.com/redis/rueidis"
)

func main() { harness.Main("rueidis "+rueidis.LibVer, connect) }

const field = "b"

// client is a connection for everything but reads that wait, for which rueidis opens another one.
type client struct {
	redis  rueidis.Client
	topic  string
	queues int
	mutex  sync.Mutex
	stream string // where the last acknowledged message went, and its id there
	id     string
}

// connect needs not make streams: the first entry does.
func connect(order *harness.Order, _ bool) (harness.Client, error) {
	redis, err := rueidis.NewClient(rueidis.ClientOption{
		InitAddress:       []string{order.Address},
		ForceSingleClient: true,
		DisableCache:      true,
		DisableRetry:      true,
		PipelineMultiplex: -1, // one connection
		// What Redis reads from its connections in one turn has one fsync, but it reads 16 KiB of each at most.
		DisableAutoPipelining: order.Work == "send" && order.Ack == "flushed" && order.Clients*order.BodyBytes > 1<<15,
		ConnWriteTimeout:      time.Minute,
	})
	if err != nil {
		return nil, err
	}
	return &client{redis: redis, topic: order.Topic, queues: order.Queues}, nil
}

func (c *client) Close() { c.redis.Close() }

func (c *client) key(queue int) string { return fmt.Sprintf("%s-%d", c.topic, queue) }

func (c *client) add(queue int, body []byte) rueidis.Completed {
	return c.redis.B().Xadd().Key(c.key(queue)).Id("*").FieldValue().FieldValue(field, rueidis.BinaryString(body)).Build()
}

func (c *client) Send(queue int, body []byte) error {
	return c.redis.Do(context.Background(), c.add(queue, body)).Error()
}

func (c *client) Echo(queue int, body []byte) error {
	id, err := c.redis.Do(context.Background(), c.add(queue, body)).ToString()
	if err != nil {
		return err
	}
	c.acknowledged(queue, id)
	return c.Visible()
}

func (c *client) acknowledged(queue int, id string) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.stream, c.id = c.key(queue), id
}

func (c *client) Visible() error {
	if c.id == "" {
		return errors.New("nothing was acknowledged")
	}
	command := c.redis.B().Xrange().Key(c.stream).Start(c.id).End(c.id).Build()
	entries, err := c.redis.Do(context.Background(), command).AsXRange()
	if err == nil && len(entries) != 1 {
		err = fmt.Errorf("the stream %s has no entry %s", c.stream, c.id)
	}
	return err
}
