package main

import (
	"context"
	"fmt"
	"time"

	"commitmq/bench/harness"

	"github.com/redis/rueidis"
)

const (
	streamsARead  = 100  // most streams that one XREAD asks
	entriesARead  = 1000 // most entries that one XREAD answers, of all its streams together
	repliesAhead  = 2    // replies that are fetched while an earlier one is looked at
	waitForNewMs  = 5000 // how long an XREAD waits for new entries
	beforeAnyID   = "0-0"
	pauseForEmpty = time.Millisecond
)

// group is a part of the streams and the last id read of each.
type group struct {
	keys, ids []string
	place     map[string]int
}

// reply is what an XREAD answered: entries of streams.
type reply struct {
	entries [][]rueidis.RedisMessage
	err     error
}

// consumer is what was read so far of each stream.
type consumer struct {
	client *client
	groups []*group
}

// Consumer asks for the last ids of the streams when it shall stand at their end.
func (c *client) Consumer(onlyNew bool) (harness.Consumer, error) {
	ids := make([]string, c.queues)
	commands := make(rueidis.Commands, 0, c.queues)
	for queue := range ids {
		ids[queue] = beforeAnyID
		if onlyNew {
			key := c.redis.B().Xrevrange().Key(c.key(queue))
			commands = append(commands, key.End("+").Start("-").Count(1).Build())
		}
	}
	for queue, result := range c.redis.DoMulti(context.Background(), commands...) {
		last, err := result.AsXRange()
		if err != nil {
			return nil, err
		}
		if len(last) > 0 {
			ids[queue] = last[0].ID
		}
	}
	return &consumer{client: c, groups: c.groups(ids)}, nil
}

// Each asks the next XREAD while take looks at what the last one answered. One group of streams is waited for by the
// server; several are asked in turn.
func (c *consumer) Each(take func(body []byte) bool) error {
	replies := make(chan reply, repliesAhead)
	stop, cancel := context.WithCancel(context.Background())
	defer cancel()
	go c.fetch(stop, replies)
	for answer := range replies {
		if answer.err != nil {
			return answer.err
		}
		for _, entries := range answer.entries {
			for _, entry := range entries {
				body, err := bodyOf(entry)
				if err != nil {
					return err
				}
				if !take(body) {
					return nil
				}
			}
		}
	}
	return nil
}

func (c *consumer) fetch(stop context.Context, replies chan<- reply) {
	defer close(replies)
	for {
		empty := true
		for _, group := range c.groups {
			answer := c.client.ask(stop, group, len(c.groups) == 1)
			if stop.Err() != nil {
				return
			}
			empty = empty && len(answer.entries) == 0 && answer.err == nil
			select {
			case replies <- answer:
			case <-stop.Done():
				return
			}
			if answer.err != nil {
				return
			}
		}
		if empty {
			time.Sleep(pauseForEmpty)
		}
	}
}

func (c *client) groups(ids []string) []*group {
	var groups []*group
	for queue := range ids {
		if queue%streamsARead == 0 {
			groups = append(groups, &group{place: map[string]int{}})
		}
		last := groups[len(groups)-1]
		last.place[c.key(queue)] = len(last.keys)
		last.keys, last.ids = append(last.keys, c.key(queue)), append(last.ids, ids[queue])
	}
	return groups
}

// ask sends one XREAD and moves the group's ids behind what it answered.
func (c *client) ask(stop context.Context, group *group, wait bool) reply {
	count := c.redis.B().Xread().Count(int64(max(1, entriesARead/len(group.keys))))
	var command rueidis.Completed
	if wait {
		command = count.Block(waitForNewMs).Streams().Key(group.keys...).Id(group.ids...).Build()
	} else {
		command = count.Streams().Key(group.keys...).Id(group.ids...).Build()
	}
	streams, err := c.redis.Do(stop, command).AsMap()
	if rueidis.IsRedisNil(err) {
		return reply{}
	}
	if err != nil {
		return reply{err: err}
	}
	answer := reply{}
	for key, stream := range streams {
		entries, err := stream.ToArray()
		if err != nil {
			return reply{err: err}
		}
		if len(entries) == 0 {
			continue
		}
		last, err := entries[len(entries)-1].ToArray()
		if err != nil {
			return reply{err: err}
		}
		if group.ids[group.place[key]], err = last[0].ToString(); err != nil {
			return reply{err: err}
		}
		answer.entries = append(answer.entries, entries)
	}
	return answer
}

// bodyOf takes the body out of an entry: [id, [field, body]].
func bodyOf(entry rueidis.RedisMessage) ([]byte, error) {
	parts, err := entry.ToArray()
	if err != nil {
		return nil, err
	}
	if len(parts) != 2 {
		return nil, fmt.Errorf("an entry of %d parts", len(parts))
	}
	fields, err := parts[1].ToArray()
	if err != nil {
		return nil, err
	}
	if len(fields) != 2 {
		return nil, fmt.Errorf("an entry of %d fields and values", len(fields))
	}
	return fields[1].AsBytes()
}
