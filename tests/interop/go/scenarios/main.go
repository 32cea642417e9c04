// Command interop plays scenarios with RocketMQ's Go client against the name server that it is given.
//
//	interop NAME_SERVER
//
// Each scenario has a topic of its own, which exists already: its name is the scenario's. All scenarios run at the same time.
// Standard output gets one JSON object: by scenario its outcome, without what differs from run to run; or {"error": "…"}.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"sync"

	"github.com/apache/rocketmq-client-go/v2/rlog"
)

type scenario struct {
	name string
	play func(place) (any, error)
}

// place is where a scenario plays: the name server, and its own topic.
type place struct {
	names string
	topic string
}

func main() {
	rlog.SetLogLevel("error")
	if err := rlog.SetOutputPath(os.DevNull); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	scenarios := append(sending, receiving...)
	outcomes := make(map[string]any, len(scenarios))
	var lock sync.Mutex
	var all sync.WaitGroup
	for _, one := range scenarios {
		all.Add(1)
		go func() {
			defer all.Done()
			outcome, err := one.play(place{os.Args[1], one.name})
			if err != nil {
				outcome = map[string]string{"error": err.Error()}
			}
			lock.Lock()
			defer lock.Unlock()
			outcomes[one.name] = outcome
		}()
	}
	all.Wait()
	if err := json.NewEncoder(os.Stdout).Encode(outcomes); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
