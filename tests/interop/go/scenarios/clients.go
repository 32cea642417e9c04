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

const (
	patience = 40 * time.Second
	// After the last expected message: what comes twice comes now.
	calm = 500 * time.Millisecond
)

// inbox has what a consumer received, in its order.
type inbox struct {
	lock sync.Mutex
	got  []string
}

func (box *inbox) put(text string) {
	box.lock.Lock()
	defer box.lock.Unlock()
	box.got = append(box.got, text)
}

func (box *inbox) all() []string {
	box.lock.Lock()
	defer box.lock.Unlock()
	return slices.Clone(box.got)
}

// wait returns everything after count messages came, in the order of the texts.
func (box *inbox) wait(count int) ([]string, error) {
	found, err := box.waitInOrder(count)
	slices.Sort(found)
	return found, err
}

func (box *inbox) waitInOrder(count int) ([]string, error) {
	until := time.Now().Add(patience)
	for len(box.all()) < count {
		if time.Now().After(until) {
			return nil, fmt.Errorf("only %v came of %d messages", box.all(), count)
		}
		time.Sleep(20 * time.Millisecond)
	}
	time.Sleep(calm)
	return box.all(), nil
}

func newProducer(at place, options ...producer.Option) (rocketmq.Producer, error) {
	options = append([]producer.Option{
		producer.WithNsResolver(primitive.NewPassthroughResolver([]string{at.names})),
		producer.WithGroupName("P_" + at.topic),
		producer.WithInstanceName("P_" + at.topic),
		producer.WithRetry(2),
	}, options...)
	made, err := rocketmq.NewProducer(options...)
	if err != nil {
		return nil, err
	}
	return made, made.Start()
}

// newConsumer starts a push consumer of the scenario's group; name tells several of them apart.
func newConsumer(
	at place, name string, selector consumer.MessageSelector,
	take func(context.Context, *primitive.MessageExt) consumer.ConsumeResult, options ...consumer.Option,
) (rocketmq.PushConsumer, error) {
	options = append([]consumer.Option{
		consumer.WithNsResolver(primitive.NewPassthroughResolver([]string{at.names})),
		consumer.WithGroupName("C_" + at.topic),
		consumer.WithInstance(at.topic + name),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
		consumer.WithConsumeMessageBatchMaxSize(1),
	}, options...)
	made, err := rocketmq.NewPushConsumer(options...)
	if err != nil {
		return nil, err
	}
	err = made.Subscribe(at.topic, selector, func(ctx context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		result := consumer.ConsumeSuccess
		for _, message := range messages {
			result = max(result, take(ctx, message))
		}
		return result, nil
	})
	if err != nil {
		return nil, err
	}
	return made, made.Start()
}

// received starts a consumer of everything, and returns the bodies after count messages.
func received(at place, count int, options ...consumer.Option) ([]string, error) {
	var box inbox
	made, err := newConsumer(at, "", everything, box.keep, options...)
	if err != nil {
		return nil, err
	}
	defer made.Shutdown()
	return box.wait(count)
}

var everything = consumer.MessageSelector{Type: consumer.TAG, Expression: "*"}

func (box *inbox) keep(_ context.Context, message *primitive.MessageExt) consumer.ConsumeResult {
	box.put(string(message.Body))
	return consumer.ConsumeSuccess
}

func messages(at place, count int) []*primitive.Message {
	made := make([]*primitive.Message, count)
	for number := range made {
		made[number] = primitive.NewMessage(at.topic, fmt.Appendf(nil, "%s %02d", at.topic, number))
	}
	return made
}

// sendAll sends one after the other. Each must be stored.
func sendAll(at place, all []*primitive.Message, options ...producer.Option) error {
	made, err := newProducer(at, options...)
	if err != nil {
		return err
	}
	defer made.Shutdown()
	for _, message := range all {
		result, err := made.SendSync(context.Background(), message)
		if err != nil {
			return err
		}
		if result.Status != primitive.SendOK {
			return fmt.Errorf("send status %d", result.Status)
		}
	}
	return nil
}
