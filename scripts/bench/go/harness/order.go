// Package harness runs the benchmark's works over any system that has a Client: it reads the order from the command
// line, makes the bodies, keeps the clock, and prints the result. What differs between systems is in their drivers.
//
// A driver is one process for one measurement. Its only argument is a JSON object, the order; its last line on standard
// output is a JSON object, the result. Everything else it says goes to standard error.
package harness

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"time"
)

// Order is what a driver is asked to do. Fields that a work does not use are ignored.
type Order struct {
	Address   string  `json:"address"` // host:port of the server
	Work      string  `json:"work"`
	Topic     string  `json:"topic"`
	Queues    int     `json:"queues"`     // queues are streams here; at least 1
	BodyBytes int     `json:"body_bytes"` // of every message
	Ack       string  `json:"ack"`        // ignored: for Redis and NATS the server's settings decide what an ack means
	Clients   int     `json:"clients"`
	Seed      uint64  `json:"seed"`
	WarmupS   float64 `json:"warmup_s"`
	Seconds   float64 `json:"seconds"`
	Window    int     `json:"window"`   // most messages sent and not yet acknowledged
	Batch     int     `json:"batch"`    // messages a batch
	Messages  int     `json:"messages"` // in all, of all clients
	Rate      float64 `json:"rate"`     // messages a second
	TimeoutS  float64 `json:"timeout_s"`
}

// Latencies are microseconds at the percentiles of all samples.
type Latencies map[string]float64

// Result is what a driver answers. Only the fields of the order's work are there.
type Result struct {
	Messages       *int      `json:"messages,omitempty"`
	Seconds        *float64  `json:"seconds,omitempty"`
	VisibleSeconds *float64  `json:"visible_seconds,omitempty"`
	Rate           *float64  `json:"rate,omitempty"` // messages a second
	LatencyUs      Latencies `json:"latency_us,omitempty"`
	Bytes          *int      `json:"bytes,omitempty"`    // of bodies
	Checksum       *uint64   `json:"checksum,omitempty"` // sum of the bodies' CRC-32, whatever their order
	FirstS         *float64  `json:"first_s,omitempty"`  // until the first message was there
	Produced       *int      `json:"produced,omitempty"`
	Consumed       *int      `json:"consumed,omitempty"`
	ProduceSeconds *float64  `json:"produce_seconds,omitempty"`
	WallTime       *float64  `json:"wall_time,omitempty"` // seconds since 1970
	Errors         int       `json:"errors"`              // sends that failed
	ErrorText      string    `json:"error_text,omitempty"`
	Client         string    `json:"client"` // the client library and its version
}

// Main runs the order in os.Args[1] with clients made by connect and ends the process.
func Main(client string, connect Connect) {
	result, err := run(os.Args[1:], connect)
	if err == nil {
		result.Client = client
		err = json.NewEncoder(os.Stdout).Encode(result)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(arguments []string, connect Connect) (*Result, error) {
	if len(arguments) != 1 {
		return nil, errors.New("one argument is needed: the order, a JSON object")
	}
	order := Order{Queues: 1, Clients: 1, BodyBytes: 1024, TimeoutS: 60, Window: 1000, Batch: 1000}
	if err := json.Unmarshal([]byte(arguments[0]), &order); err != nil {
		return nil, fmt.Errorf("the order is no JSON object as expected: %w", err)
	}
	if order.Address == "" || order.Topic == "" || order.Queues < 1 || order.Clients < 1 || order.BodyBytes < 0 ||
		order.Window < 1 || order.Batch < 1 {
		return nil, errors.New("address and topic must be there, queues, clients, window and batch at least 1")
	}
	job := &job{Order: order, connect: connect, bodies: makeBodies(order.Seed, order.BodyBytes), began: time.Now()}
	works := map[string]func() (*Result, error){
		"send": job.send, "pipeline": job.pipeline, "batch": job.batch, "read": job.read,
		"end_to_end": job.endToEnd, "mixed": job.mixed, "ready": job.ready,
	}
	work, known := works[order.Work]
	if !known {
		return nil, fmt.Errorf("no work of the name %q", order.Work)
	}
	return work()
}

const bodyCount = 256 // different bodies, made before any clock starts

// makeBodies returns pseudo-random printable bodies of length bytes each, the same ones for the same seed.
func makeBodies(seed uint64, length int) [][]byte {
	const letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
	random := rand.New(rand.NewPCG(seed, 0))
	bodies := make([][]byte, bodyCount)
	for index := range bodies {
		body := make([]byte, length)
		for place := range body {
			body[place] = letters[random.IntN(len(letters))]
		}
		bodies[index] = body
	}
	return bodies
}

func ptr[T any](value T) *T { return &value }
