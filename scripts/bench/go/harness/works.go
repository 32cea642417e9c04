package harness

import (
	"fmt"
	"hash/crc32"
	"sync"
	"time"
)

// job is one order being carried out.
type job struct {
	Order
	connect Connect
	bodies  [][]byte
	began   time.Time
}

func (j *job) body(number int) []byte { return j.bodies[number%len(j.bodies)] }

// failures counts failed sends of several goroutines and keeps the first one's text.
type failures struct {
	mutex sync.Mutex
	count int
	text  string
}

func (f *failures) add(count int, err error) {
	if count == 0 {
		return
	}
	f.mutex.Lock()
	defer f.mutex.Unlock()
	f.count += count
	if f.text == "" {
		f.text = err.Error()
	}
}

// send has each of the clients send one message after another and wait for each ack.
func (j *job) send() (*Result, error) {
	client, err := j.connect(&j.Order, true)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	var failed failures
	var all sync.WaitGroup
	samples := make([][]time.Duration, j.Clients)
	start := time.Now().Add(seconds(j.WarmupS))
	end := start.Add(seconds(j.Seconds))
	for number := range j.Clients {
		all.Go(func() {
			mine := make([]time.Duration, 0, 1<<16)
			for index := number; ; index += j.Clients {
				before := time.Now()
				if before.After(end) {
					break
				}
				err := client.Send(index%j.Queues, j.body(index))
				if before.Before(start) {
					continue
				}
				if err != nil {
					failed.add(1, err)
					continue
				}
				mine = append(mine, time.Since(before))
			}
			samples[number] = mine
		})
	}
	all.Wait()
	took := time.Since(start)
	var merged []time.Duration
	for _, mine := range samples {
		merged = append(merged, mine...)
	}
	return &Result{
		Messages: ptr(len(merged)), Seconds: ptr(took.Seconds()), Rate: ptr(float64(len(merged)) / took.Seconds()),
		LatencyUs: percentiles(merged), Errors: failed.count, ErrorText: failed.text,
	}, nil
}

// pipeline has one client send single messages without waiting for each ack.
func (j *job) pipeline() (*Result, error) {
	j.Clients = 1
	return j.produce(func(client Client) Stream { return client.Stream(j.Window, 0) }, 1)
}

// batch has each client send batches; a batch goes to one queue, the next one to the next queue. At least two batches of
// each client are under way at a time, so that the server has work while a client prepares the next one.
func (j *job) batch() (*Result, error) {
	return j.produce(j.batches, j.Batch)
}

const messagesUnderWay = 2000 // of each client, unless two batches are more

func (j *job) batches(client Client) Stream {
	return client.Stream(max(2*j.Batch, messagesUnderWay), j.Batch)
}

// produce sends all messages of all clients, run by run messages in turn to each queue.
func (j *job) produce(open func(Client) Stream, run int) (*Result, error) {
	if err := j.warmUp(open); err != nil {
		return nil, err
	}
	clients := make([]Client, j.Clients)
	for number := range clients {
		client, err := j.connect(&j.Order, number == 0)
		if err != nil {
			return nil, err
		}
		defer client.Close()
		clients[number] = client
	}
	var failed failures
	var all sync.WaitGroup
	var sum checksum
	start := time.Now()
	for number, client := range clients {
		first, last := j.Messages*number/j.Clients, j.Messages*(number+1)/j.Clients
		all.Go(func() {
			stream := open(client)
			for index := first; index < last; index++ {
				stream.Put(index/run%j.Queues, j.body(index))
			}
			failed.add(stream.Wait())
		})
	}
	all.Wait()
	took := time.Since(start)
	for _, client := range clients {
		if err := client.Visible(); err != nil {
			return nil, fmt.Errorf("the last message cannot be read: %w", err)
		}
	}
	visible := time.Since(start)
	for index := range j.Messages {
		sum.add(j.body(index))
	}
	return &Result{
		Messages: ptr(j.Messages - failed.count), Seconds: ptr(took.Seconds()), VisibleSeconds: ptr(visible.Seconds()),
		Bytes: ptr(sum.bytes), Checksum: ptr(sum.value), Errors: failed.count, ErrorText: failed.text,
	}, nil
}

// warmUp sends like the measured clients to a topic of its own, so that the measured one holds what was counted.
func (j *job) warmUp(open func(Client) Stream) error {
	end := time.Now().Add(seconds(j.WarmupS))
	order := j.Order
	order.Topic, order.Queues = j.Topic+"-warm-up", 1
	client, err := j.connect(&order, true)
	if err != nil {
		return err
	}
	defer client.Close()
	stream := open(client)
	for index := 0; time.Now().Before(end); index++ {
		stream.Put(0, j.body(index))
	}
	_, err = stream.Wait()
	return err
}

// checksum adds up the CRC-32 of bodies, so that their order does not matter.
type checksum struct {
	messages int
	bytes    int
	value    uint64
}

func (c *checksum) add(body []byte) {
	c.messages++
	c.bytes += len(body)
	c.value += uint64(crc32.ChecksumIEEE(body))
}

// read has a new consumer read the given number of messages; every byte of their bodies goes through a CRC-32.
func (j *job) read() (*Result, error) {
	client, err := j.connect(&j.Order, false)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	consumer, err := client.Consumer(false)
	if err != nil {
		return nil, err
	}
	var sum checksum
	var first float64
	start := time.Now()
	err = consumer.Each(func(body []byte) bool {
		if sum.messages == 0 {
			first = time.Since(start).Seconds()
		}
		sum.add(body)
		return sum.messages < j.Messages
	})
	if err != nil {
		return nil, fmt.Errorf("after %d of %d messages: %w", sum.messages, j.Messages, err)
	}
	return &Result{
		Messages: ptr(sum.messages), Seconds: ptr(time.Since(start).Seconds()), Bytes: ptr(sum.bytes),
		Checksum: ptr(sum.value), FirstS: ptr(first),
	}, nil
}

// ready tries to store a message and read it back, every 20 ms with new connections, until it works.
func (j *job) ready() (*Result, error) {
	deadline := j.began.Add(seconds(j.TimeoutS))
	for {
		again := time.Now().Add(20 * time.Millisecond)
		err := j.echoOnce()
		now := time.Now()
		if err == nil {
			return &Result{
				Seconds: ptr(now.Sub(j.began).Seconds()), WallTime: ptr(float64(now.UnixNano()) / 1e9),
			}, nil
		}
		if now.After(deadline) {
			return nil, fmt.Errorf("not ready within %g s: %w", j.TimeoutS, err)
		}
		time.Sleep(time.Until(again))
	}
}

func (j *job) echoOnce() error {
	client, err := j.connect(&j.Order, true)
	if err != nil {
		return err
	}
	defer client.Close()
	return client.Echo(0, j.body(0))
}

func seconds(value float64) time.Duration { return time.Duration(value * float64(time.Second)) }
