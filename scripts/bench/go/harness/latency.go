package harness

import (
	"slices"
	"time"
)

// percentiles of all samples, by the nearest-rank rule, in microseconds. No samples give no percentiles.
func percentiles(samples []time.Duration) Latencies {
	if len(samples) == 0 {
		return Latencies{}
	}
	slices.Sort(samples)
	result := Latencies{"max": micros(samples[len(samples)-1])}
	for _, point := range []struct {
		name       string
		perHundred float64
	}{{"p50", 50}, {"p90", 90}, {"p99", 99}, {"p99.9", 99.9}, {"p99.99", 99.99}} {
		rank := int(float64(len(samples)) * point.perHundred / 100)
		result[point.name] = micros(samples[min(rank, len(samples)-1)])
	}
	return result
}

func micros(duration time.Duration) float64 { return float64(duration.Nanoseconds()) / 1e3 }
