// Package figures has the common parts of benchmarks: quantiles, records of measurements as JSON
// lines, and a table. The table compares each figure with a target and with a reference measured in
// the same run.
package figures

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"time"
)

// Record is one measurement, written as a JSON line.
type Record struct {
	Measure string             `json:"measure"`
	Params  map[string]any     `json:"params"`
	Values  map[string]float64 `json:"values"`
	CPU     map[string]float64 `json:"cpu_s,omitempty"`     // CPU seconds by process
	Busy    float64            `json:"host_busy,omitempty"` // busy share of all processors, 0 to 1

	// Others is the part of Busy that was spent on work outside of the measurement.
	Others float64 `json:"host_others,omitempty"`

	Samples   []float64 `json:"samples,omitempty"`   // single samples, if there are few
	Reference *Measured `json:"reference,omitempty"` // the same measurement of the reference in the same run
}

// Measured is the same measurement of another system.
type Measured struct {
	Name    string             `json:"name"`
	Values  map[string]float64 `json:"values"`
	CPU     map[string]float64 `json:"cpu_s,omitempty"`
	Busy    float64            `json:"host_busy,omitempty"`
	Samples []float64          `json:"samples,omitempty"`
}

// WriteLines writes records as JSON lines.
func WriteLines(w io.Writer, records []Record) error {
	enc := json.NewEncoder(w)
	for _, r := range records {
		if err := enc.Encode(r); err != nil {
			return fmt.Errorf("writing the record of %s: %w", r.Measure, err)
		}
	}
	return nil
}

// ReadLines reads the records written by WriteLines.
func ReadLines(r io.Reader) ([]Record, error) {
	var out []Record
	for dec := json.NewDecoder(r); ; {
		var rec Record
		switch err := dec.Decode(&rec); err {
		case nil:
			out = append(out, rec)
		case io.EOF:
			return out, nil
		default:
			return nil, fmt.Errorf("reading record %d: %w", len(out)+1, err)
		}
	}
}

// FindRecord returns the first record of a measurement whose parameters include params.
func FindRecord(records []Record, measure string, params map[string]any) (Record, bool) {
	for _, r := range records {
		if r.Measure != measure {
			continue
		}
		match := true
		for k, v := range params {
			// Compared as text, because numbers read from JSON are float64.
			match = match && fmt.Sprint(r.Params[k]) == fmt.Sprint(v)
		}
		if match {
			return r, true
		}
	}
	return Record{}, false
}

// Quantile returns the q-quantile by nearest rank: the smallest sample that is not exceeded by at
// least the share q of the samples. It returns NaN without samples. It sorts the samples.
func Quantile[T ~int64 | ~float64](samples []T, q float64) float64 {
	if len(samples) == 0 {
		return math.NaN()
	}
	slices.Sort(samples)
	rank := int(math.Ceil(q * float64(len(samples))))
	return float64(samples[min(max(rank, 1), len(samples))-1])
}

// Latencies returns p50_ms, p99_ms, max_ms and n of durations, in milliseconds. Without samples it
// returns n only.
func Latencies(samples []time.Duration) map[string]float64 {
	out := map[string]float64{"n": float64(len(samples))}
	if len(samples) == 0 {
		return out
	}
	ms := func(q float64) float64 { return Quantile(samples, q) / float64(time.Millisecond) }
	out["p50_ms"], out["p99_ms"], out["max_ms"] = ms(0.5), ms(0.99), ms(1)
	return out
}
