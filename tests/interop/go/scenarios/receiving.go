package main

import (
	"context"
	"fmt"
	"slices"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

var receiving = []scenario{
	{"ordered", playOrdered},
	{"tags", playTags},
	{"sql", playSQL},
	{"clustering", playClustering},
	{"broadcast", playBroadcast},
	{"resumed", playResumed},
	{"pull", playPull},
	{"retry", playRetry},
}

// playOrdered: the messages of one key come in their order.
func playOrdered(at place) (any, error) {
	all := messages(at, 15)
	for number, message := range all {
		message.WithShardingKey(fmt.Sprint("key ", number%3))
	}
	if err := sendAll(at, all, producer.WithQueueSelector(producer.NewHashQueueSelector())); err != nil {
		return nil, err
	}
	var box inbox
	byKey := map[string][]string{}
	take := func(_ context.Context, message *primitive.MessageExt) consumer.ConsumeResult {
		box.lock.Lock()
		defer box.lock.Unlock()
		key := message.GetShardingKey()
		byKey[key] = append(byKey[key], string(message.Body))
		box.got = append(box.got, string(message.Body))
		return consumer.ConsumeSuccess
	}
	made, err := newConsumer(at, "", everything, take, consumer.WithConsumerOrder(true))
	if err != nil {
		return nil, err
	}
	defer made.Shutdown()
	if _, err := box.waitInOrder(15); err != nil {
		return nil, err
	}
	return byKey, nil
}

func playTags(at place) (any, error) {
	all := messages(at, 9)
	for number, message := range all {
		message.WithTag(string(rune('A' + number%3)))
	}
	return filtered(at, all, consumer.MessageSelector{Type: consumer.TAG, Expression: "A || C"}, 6)
}

func playSQL(at place) (any, error) {
	all := messages(at, 9)
	for number, message := range all {
		message.WithProperty("number", fmt.Sprint(number))
	}
	selector := consumer.MessageSelector{Type: consumer.SQL92, Expression: "number BETWEEN 2 AND 5 OR number = 8"}
	return filtered(at, all, selector, 5)
}

func filtered(at place, all []*primitive.Message, selector consumer.MessageSelector, count int) (any, error) {
	if err := sendAll(at, all); err != nil {
		return nil, err
	}
	var box inbox
	made, err := newConsumer(at, "", selector, box.keep)
	if err != nil {
		return nil, err
	}
	defer made.Shutdown()
	return box.wait(count)
}

// playClustering: two consumers of a group have each message once between them.
func playClustering(at place) (any, error) {
	var box inbox
	for _, name := range []string{"one", "two"} {
		made, err := newConsumer(at, name, everything, box.keep)
		if err != nil {
			return nil, err
		}
		defer made.Shutdown()
	}
	if err := sendAll(at, messages(at, 20)); err != nil {
		return nil, err
	}
	found, err := box.wait(20)
	// Which queues move while messages come depends on the moment; a move may repeat a message.
	return slices.Compact(found), err
}

// playBroadcast: each of two consumers has every message.
func playBroadcast(at place) (any, error) {
	if err := sendAll(at, messages(at, 5)); err != nil {
		return nil, err
	}
	found := map[string][]string{}
	for _, name := range []string{"one", "two"} {
		var box inbox
		made, err := newConsumer(at, name, everything, box.keep, consumer.WithConsumerModel(consumer.BroadCasting))
		if err != nil {
			return nil, err
		}
		defer made.Shutdown()
		if found[name], err = box.wait(5); err != nil {
			return nil, err
		}
	}
	return found, nil
}

// playResumed: the second consumer of a group begins where the first one ended.
func playResumed(at place) (any, error) {
	found := map[string][]string{}
	all := messages(at, 10)
	for turn, name := range []string{"first", "second"} {
		if err := sendAll(at, all[turn*5:turn*5+5]); err != nil {
			return nil, err
		}
		var box inbox
		made, err := newConsumer(at, name, everything, box.keep)
		if err != nil {
			return nil, err
		}
		found[name], err = box.wait(5)
		if err != nil {
			return nil, err
		}
		if err := made.Shutdown(); err != nil {
			return nil, err
		}
	}
	return found, nil
}

// pulled messages are sent, as many to each queue.
const pulled = 12

// playPull: every queue from its beginning to its end, and the offsets kept at the broker.
func playPull(at place) (any, error) {
	if err := sendAll(at, messages(at, pulled)); err != nil {
		return nil, err
	}
	made, err := rocketmq.NewPullConsumer(
		consumer.WithNsResolver(primitive.NewPassthroughResolver([]string{at.names})),
		consumer.WithGroupName("C_"+at.topic),
		consumer.WithInstance(at.topic),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
	)
	if err != nil {
		return nil, err
	}
	if err := made.Subscribe(at.topic, everything); err != nil {
		return nil, err
	}
	if err := made.Start(); err != nil {
		return nil, err
	}
	defer made.Shutdown()
	queues, err := made.GetTopicRouteInfo(at.topic)
	if err != nil {
		return nil, err
	}
	var bodies []string
	ends := 0
	for _, queue := range queues {
		// A broker shows what it stored a moment later: each queue is read until it has given its share.
		var next, end int64
		for next < int64(pulled/len(queues)) {
			result, err := made.PullFrom(context.Background(), queue, next, 32)
			if err != nil {
				return nil, err
			}
			for _, message := range result.GetMessageExts() {
				bodies = append(bodies, string(message.Body))
			}
			next, end = result.NextBeginOffset, result.MaxOffset
		}
		ends += int(end)
		if err := made.UpdateOffset(queue, next); err != nil {
			return nil, err
		}
	}
	if err := made.PersistOffset(context.Background(), at.topic); err != nil {
		return nil, err
	}
	slices.Sort(bodies)
	return map[string]any{"received": bodies, "queues": len(queues), "ends": ends}, nil
}

// playRetry: a message that fails comes again from the retry topic, with its count.
func playRetry(at place) (any, error) {
	if err := sendAll(at, messages(at, 2)); err != nil {
		return nil, err
	}
	var box inbox
	made, err := newConsumer(at, "", everything, func(ctx context.Context, message *primitive.MessageExt) consumer.ConsumeResult {
		box.put(fmt.Sprintf("%s, times %d, topic %s", message.Body, message.ReconsumeTimes, message.Topic))
		if message.ReconsumeTimes > 0 {
			return consumer.ConsumeSuccess
		}
		if concurrent, ok := primitive.GetConcurrentlyCtx(ctx); ok {
			concurrent.DelayLevelWhenNextConsume = 1
		}
		return consumer.ConsumeRetryLater
	})
	if err != nil {
		return nil, err
	}
	defer made.Shutdown()
	return box.wait(4)
}
