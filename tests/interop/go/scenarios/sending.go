package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

var sending = []scenario{
	{"sync", playSync},
	{"async", playAsync},
	{"oneway", playOneWay},
	{"batch", playBatch},
	{"delay", playDelay},
	{"transaction", playTransaction},
}

func playSync(at place) (any, error) {
	if err := sendAll(at, messages(at, 10)); err != nil {
		return nil, err
	}
	return received(at, 10)
}

func playAsync(at place) (any, error) {
	made, err := newProducer(at)
	if err != nil {
		return nil, err
	}
	defer made.Shutdown()
	results := make(chan error, 10)
	for _, message := range messages(at, 10) {
		err := made.SendAsync(context.Background(), func(_ context.Context, result *primitive.SendResult, err error) {
			if err == nil && result.Status != primitive.SendOK {
				err = fmt.Errorf("send status %d", result.Status)
			}
			results <- err
		}, message)
		if err != nil {
			return nil, err
		}
	}
	for range 10 {
		if err := <-results; err != nil {
			return nil, err
		}
	}
	return received(at, 10)
}

func playOneWay(at place) (any, error) {
	made, err := newProducer(at)
	if err != nil {
		return nil, err
	}
	defer made.Shutdown()
	for _, message := range messages(at, 10) {
		if err := made.SendOneWay(context.Background(), message); err != nil {
			return nil, err
		}
	}
	return received(at, 10)
}

func playBatch(at place) (any, error) {
	made, err := newProducer(at)
	if err != nil {
		return nil, err
	}
	defer made.Shutdown()
	result, err := made.SendSync(context.Background(), messages(at, 10)...)
	if err != nil {
		return nil, err
	}
	found, err := received(at, 10)
	return map[string]any{"status": result.Status, "received": found}, err
}

func playDelay(at place) (any, error) {
	all := messages(at, 2)
	all[1].WithDelayTimeLevel(1)
	var box inbox
	made, err := newConsumer(at, "", everything, func(_ context.Context, message *primitive.MessageExt) consumer.ConsumeResult {
		late := time.Since(time.UnixMilli(message.BornTimestamp)) > 900*time.Millisecond
		box.put(fmt.Sprintf("%s, late: %t", message.Body, late))
		return consumer.ConsumeSuccess
	})
	if err != nil {
		return nil, err
	}
	defer made.Shutdown()
	// The first message shows that the consumer has its queues; then nothing but the delay makes one late.
	for {
		if err := sendAll(at, messages(at, 1)); err != nil {
			return nil, err
		}
		time.Sleep(200 * time.Millisecond)
		if len(box.all()) > 0 {
			break
		}
	}
	time.Sleep(calm)
	box.lock.Lock()
	box.got = nil
	box.lock.Unlock()
	if err := sendAll(at, all); err != nil {
		return nil, err
	}
	return box.wait(2)
}

// decider says by a message's body how its transaction ends; "later" is said only when the broker asks.
type decider struct {
	lock  sync.Mutex
	asked map[string]bool
}

func (one *decider) ExecuteLocalTransaction(message *primitive.Message) primitive.LocalTransactionState {
	switch string(message.Body) {
	case "commit":
		return primitive.CommitMessageState
	case "rollback":
		return primitive.RollbackMessageState
	}
	return primitive.UnkonwnState
}

func (one *decider) CheckLocalTransaction(message *primitive.MessageExt) primitive.LocalTransactionState {
	one.lock.Lock()
	defer one.lock.Unlock()
	one.asked[string(message.Body)] = true
	if string(message.Body) == "rollback" {
		return primitive.RollbackMessageState
	}
	return primitive.CommitMessageState
}

func playTransaction(at place) (any, error) {
	listener := &decider{asked: map[string]bool{}}
	made, err := rocketmq.NewTransactionProducer(
		listener,
		producer.WithNsResolver(primitive.NewPassthroughResolver([]string{at.names})),
		producer.WithGroupName("P_"+at.topic),
		producer.WithInstanceName("P_"+at.topic),
	)
	if err != nil {
		return nil, err
	}
	if err := made.Start(); err != nil {
		return nil, err
	}
	defer made.Shutdown()
	for _, body := range []string{"commit", "rollback", "later"} {
		if _, err := made.SendMessageInTransaction(context.Background(), primitive.NewMessage(at.topic, []byte(body))); err != nil {
			return nil, err
		}
	}
	// A consumer of the same client sends the producer's group with its first heartbeat; by itself it would wait 30 s.
	found, err := received(at, 2, consumer.WithInstance("P_"+at.topic))
	listener.lock.Lock()
	defer listener.lock.Unlock()
	// RocketMQ's end of a transaction is one-way: where it is lost, the broker asks, and a message may come twice.
	return map[string]any{"received": slices.Compact(found), "asked": listener.asked["later"]}, err
}
