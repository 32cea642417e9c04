package main

import (
	"context"
	"sync"

	"commitmq/bench/harness"

	"github.com/redis/rueidis"
)

// stream gathers commands into pipelines. Each pipeline has a goroutine that waits for its replies; rueidis writes the
// pipelines of several goroutines one behind the other into the same connection.
type stream struct {
	client  *client
	portion int           // commands a pipeline
	room    chan struct{} // a token for every pipeline that may be under way
	waiting rueidis.Commands
	queue   int // of the last waiting command
	under   sync.WaitGroup
	mutex   sync.Mutex
	failed  int
	failure error
}

// Stream sends pipelines of batch commands. Without a batch they are a quarter of the window, so that some are on the
// way while replies of others arrive.
func (c *client) Stream(window, batch int) harness.Stream {
	if batch == 0 {
		batch = max(1, window/4)
	}
	return &stream{client: c, portion: batch, room: make(chan struct{}, max(1, window/batch))}
}

func (s *stream) Put(queue int, body []byte) {
	s.waiting = append(s.waiting, s.client.add(queue, body))
	s.queue = queue
	if len(s.waiting) >= s.portion {
		s.Flush()
	}
}

func (s *stream) Flush() {
	if len(s.waiting) == 0 {
		return
	}
	commands, queue := s.waiting, s.queue
	s.waiting = make(rueidis.Commands, 0, s.portion)
	s.room <- struct{}{}
	s.under.Go(func() {
		results := s.client.redis.DoMulti(context.Background(), commands...)
		<-s.room
		for _, result := range results {
			if err := result.Error(); err != nil {
				s.fail(err)
			}
		}
		if id, err := results[len(results)-1].ToString(); err == nil {
			s.client.acknowledged(queue, id)
		}
	})
}

func (s *stream) fail(err error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.failed++; s.failure == nil {
		s.failure = err
	}
}

func (s *stream) Wait() (int, error) {
	s.Flush()
	s.under.Wait()
	return s.failed, s.failure
}
