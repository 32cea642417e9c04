package harness

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"
)

// planBytes at the beginning of a body say when the message was planned to be sent, in nanoseconds since the start.
const planBytes = 8

// endToEnd sends at a fixed rate, whatever the system does, and measures from the planned time of each message to its
// arrival at a consumer in this process: a stalled system pays for every message it held up.
func (j *job) endToEnd() (*Result, error) {
	if j.BodyBytes < planBytes || j.Rate <= 0 {
		return nil, fmt.Errorf("end_to_end needs a rate and bodies of at least %d bytes", planBytes)
	}
	producer, consumer, closeBoth, err := j.both()
	if err != nil {
		return nil, err
	}
	defer closeBoth()
	warmup, total := int(j.Rate*j.WarmupS), int(j.Rate*(j.WarmupS+j.Seconds))
	samples := make([]time.Duration, 0, total-warmup)
	var start time.Time
	received := -1 // the first message says that the consumer is there
	arrived := make(chan struct{})
	ended := make(chan error, 1)
	go func() {
		ended <- consumer.Each(func(body []byte) bool {
			if received < 0 {
				close(arrived)
				received = 0
				return true
			}
			planned := time.Duration(binary.LittleEndian.Uint64(body))
			if received >= warmup {
				samples = append(samples, time.Since(start)-planned)
			}
			received++
			return received < total
		})
	}()
	start = time.Now()
	if err := producer.Send(0, make([]byte, j.BodyBytes)); err != nil {
		return nil, err
	}
	if err := await(arrived, ended); err != nil {
		return nil, err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	stream := producer.Stream(1<<12, 0)
	interval := float64(time.Second) / j.Rate
	start = time.Now()
	for index := range total {
		planned := time.Duration(float64(index) * interval)
		if early := planned - time.Since(start); early > 0 {
			stream.Flush()
			for ; early > 0; early = planned - time.Since(start) {
				pause(early)
			}
		}
		body := append([]byte(nil), j.body(index)...)
		binary.LittleEndian.PutUint64(body, uint64(planned))
		stream.Put(index%j.Queues, body)
	}
	count, err := stream.Wait()
	if count > 0 {
		return nil, fmt.Errorf("%d of %d sends failed: %w", count, total, err)
	}
	select {
	case err = <-ended:
	case <-time.After(time.Minute):
		err = errors.New("the consumer did not get every message within a minute after the last was sent")
	}
	if err != nil {
		return nil, err
	}
	return &Result{
		Messages: ptr(len(samples)), Rate: ptr(float64(total) / time.Since(start).Seconds()),
		LatencyUs: percentiles(samples),
	}, nil
}

// mixed has one client send batches for the given time while a consumer follows; the clock stops when the consumer has
// every message.
func (j *job) mixed() (*Result, error) {
	producer, consumer, closeBoth, err := j.both()
	if err != nil {
		return nil, err
	}
	defer closeBoth()
	var total atomic.Int64 // messages that will have been sent, once it is known
	total.Store(1 << 62)
	var sum checksum
	arrived := make(chan struct{})
	ended := make(chan error, 1)
	go func() {
		ended <- consumer.Each(func(body []byte) bool {
			if sum.add(body); sum.messages == 1 {
				close(arrived)
			}
			return int64(sum.messages) < total.Load()
		})
	}()
	if err := producer.Send(0, j.body(0)); err != nil {
		return nil, err
	}
	if err := await(arrived, ended); err != nil {
		return nil, err
	}
	stream := j.batches(producer)
	start := time.Now()
	end := start.Add(seconds(j.Seconds))
	produced := 0
	for ; time.Now().Before(end); produced += j.Batch {
		for index := range j.Batch {
			stream.Put(produced/j.Batch%j.Queues, j.body(produced+index))
		}
	}
	// One more message after the total is known wakes a consumer that was done before.
	total.Store(int64(1 + produced + 1))
	stream.Put(0, j.body(0))
	failed, err := stream.Wait()
	sent := time.Since(start)
	if failed > 0 {
		return nil, fmt.Errorf("%d of %d sends failed: %w", failed, produced, err)
	}
	if err := <-ended; err != nil {
		return nil, err
	}
	return &Result{
		Produced: ptr(produced + 1), Consumed: ptr(sum.messages - 1), Seconds: ptr(time.Since(start).Seconds()),
		ProduceSeconds: ptr(sent.Seconds()),
	}, nil
}

// both makes a producer and a consumer that stands at the end, with connections of their own, and what closes these.
func (j *job) both() (Client, Consumer, func(), error) {
	producer, err := j.connect(&j.Order, true)
	if err != nil {
		return nil, nil, nil, err
	}
	other, err := j.connect(&j.Order, false)
	if err != nil {
		producer.Close()
		return nil, nil, nil, err
	}
	closeBoth := func() {
		other.Close()
		producer.Close()
	}
	consumer, err := other.Consumer(true)
	if err != nil {
		closeBoth()
		return nil, nil, nil, err
	}
	return producer, consumer, closeBoth, nil
}

// await returns when the consumer got its first message, or why it did not.
func await(arrived <-chan struct{}, ended <-chan error) error {
	select {
	case <-arrived:
		return nil
	case err := <-ended:
		if err == nil {
			err = errors.New("the consumer ended before it began")
		}
		return err
	case <-time.After(30 * time.Second):
		return errors.New("the first message did not reach the consumer within 30 s")
	}
}

// pause sleeps in the kernel: Go's own timers wake an idle process up to a millisecond late, which would be counted as
// the system's latency. A signal ends it early.
func pause(duration time.Duration) {
	timespec := syscall.NsecToTimespec(duration.Nanoseconds())
	_ = syscall.Nanosleep(&timespec, nil)
}
