package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"keelson.dev/keelson/test/bench/figures"
	"keelson.dev/keelson/test/bench/procfs"
	"keelson.dev/keelson/test/bench/store/drive"
)

// benchmarks is one run of the benchmark: its running groups and its results so far.
type benchmarks struct {
	options  options
	progress progress
	self     string // path of this program
	dir      string
	groups   map[string]*group // by name
	records  []figures.Record
}

// progress prints lines about the progress of a run, with the estimated time left.
type progress struct {
	to    io.Writer
	began time.Time
	left  time.Duration // of the later steps
	step  time.Time     // start of the current step
	lasts time.Duration // estimated duration of the current step
}

func (p *progress) printProgress(format string, args ...any) {
	left := p.left + max(0, p.lasts-time.Since(p.step))
	fmt.Fprintf(p.to, "%5.0fs, about %3.0fs left: %s\n", time.Since(p.began).Seconds(), left.Seconds(),
		fmt.Sprintf(format, args...))
}

// measure is a measurement that is made in turn with each variant. Its functions get the variant.
type measure struct {
	name     string
	params   map[string]any
	variants []variant
	rounds   int
	warm     func(ctx context.Context, a variant) error // once before the first round; nil = not needed
	prepare  func(ctx context.Context, a variant) error // before each round, not metered; nil = not needed
	do       func(ctx context.Context, a variant) (map[string]float64, error)
}

// variantResults are the values of all rounds of a measurement with one variant (a group of members
// and the location of its clients), and their cost.
type variantResults struct {
	rounds []map[string]float64
	cost
}

// cost is the processor time that the rounds of a measurement have used.
type cost struct {
	cpu    map[string]float64 // seconds by process, sum of the rounds
	busy   float64            // mean of the rounds
	others float64            // maximum of the rounds
	rounds int
}

// meterRound calls do, which is one round, and adds its cost to c. It returns the CPU seconds of
// the variant's processes, except processes that start or exit meanwhile.
func (c *cost) meterRound(a variant, do func() error) (float64, error) {
	var r figures.Record
	began, before := time.Now(), a.cpuSeconds()
	if err := a.newMeter().Run(&r, do); err != nil {
		return 0, err
	}
	// The meter has only processes that run all the time, but members may restart.
	mine := a.cpuSeconds() - before + r.CPU[procfs.Self]
	others := max(0, r.Busy-mine/(time.Since(began).Seconds()*float64(runtime.NumCPU())))
	if c.cpu == nil {
		c.cpu = make(map[string]float64)
	}
	all := 0.0
	for name, s := range r.CPU {
		if name != procfs.Self {
			c.cpu[name] += s
			all += s
		}
	}
	c.rounds++
	c.busy += (r.Busy - c.busy) / float64(c.rounds)
	c.others = max(c.others, others)
	return all, nil
}

// newRecord returns r with values and their cost.
func (c cost) newRecord(r figures.Record, values map[string]float64) figures.Record {
	r.Values, r.CPU, r.Busy, r.Others = values, c.cpu, c.busy, c.others
	return r
}

// reference returns values, and the cost c that they had, as the result of the reference with this
// name.
func (c cost) reference(name string, values map[string]float64) *figures.Measured {
	return &figures.Measured{Name: name, Values: values, CPU: c.cpu, Busy: c.busy}
}

// runMeasurement runs the rounds of m. The speed of a machine changes, so every variant has a turn
// in each round, and the order is reversed from round to round. The results are medians of the
// rounds. Each of Keelson's variants becomes one record with the reference.
func (b *benchmarks) runMeasurement(ctx context.Context, m measure) error {
	got := make([]variantResults, len(m.variants))
	for _, a := range m.variants {
		if m.warm == nil {
			break
		}
		b.progress.printProgress("%s%s: warming up: %s", m.name, bracketParams(m.params), a)
		if err := m.warm(ctx, a); err != nil {
			return fmt.Errorf("%s, %s: %w", m.name, a, err)
		}
	}
	for round := range m.rounds {
		for turn := range m.variants {
			at := turn
			if round%2 == 1 {
				at = len(m.variants) - 1 - turn
			}
			a := m.variants[at]
			b.progress.printProgress("%s%s: round %d of %d: %s", m.name, bracketParams(m.params), round+1, m.rounds, a)
			if m.prepare != nil {
				if err := m.prepare(ctx, a); err != nil {
					return fmt.Errorf("%s, %s: %w", m.name, a, err)
				}
			}
			profiles, err := b.startProfiles(a, m, round)
			if err != nil {
				return err
			}
			err = got[at].runRound(ctx, a, m.do)
			if _, ended := profiles.stopLoad(ctx); err == nil {
				err = ended
			}
			if err != nil {
				return fmt.Errorf("%s, %s: %w", m.name, a, err)
			}
		}
	}
	b.addRecords(m, got)
	return nil
}

// startProfiles starts CPU profiles of Keelson's processes for a round, if -profiles is set.
func (b *benchmarks) startProfiles(a variant, m measure, round int) (pendingRequests, error) {
	if b.options.profiles == "" || !a.clientsInside {
		return nil, nil
	}
	if err := os.MkdirAll(b.options.profiles, 0o755); err != nil {
		return nil, fmt.Errorf("-profiles: %w", err)
	}
	of := make(map[string]*process)
	for _, member := range a.members {
		of[member.setup.Name] = member.process
	}
	if a.at != inProcess {
		of["clients"] = a.load
	}
	var out pendingRequests
	for who, proc := range of {
		name := strings.ReplaceAll(fmt.Sprintf("%s %s %s %s %d.prof", m.name, formatParams(m.params), a, who, round+1),
			" ",
			"_")
		path, err := filepath.Abs(filepath.Join(b.options.profiles, strings.ReplaceAll(name, "/", "_")))
		if err != nil {
			return out, err
		}
		w, err := proc.sendRequest(drive.Request{Do: drive.DoProfile, Address: path})
		if err != nil {
			return out, err
		}
		out = append(out, w)
	}
	return out, nil
}

// runRound calls do with variant a as one round, and adds its values and its cost to the results.
func (o *variantResults) runRound(
	ctx context.Context, a variant, do func(context.Context, variant) (map[string]float64, error),
) error {
	var values map[string]float64
	began, before := time.Now(), a.newMeter().Processes
	seconds, err := o.meterRound(a, func() (err error) {
		values, err = do(ctx, a)
		return err
	})
	if err != nil {
		return err
	}
	if n := values["n"]; n > 0 {
		values["cpu_us"] = 1e6 * seconds / n
	}
	if maps.Equal(before, a.newMeter().Processes) { // otherwise the CPU time is incomplete
		values["cores"] = seconds / time.Since(began).Seconds()
	}
	o.rounds = append(o.rounds, values)
	return nil
}

// addRecords adds a record with the results of each variant to the records of the run.
func (b *benchmarks) addRecords(m measure, got []variantResults) {
	var reference *figures.Measured
	for i, a := range m.variants {
		if a.isReference() {
			reference = got[i].reference(b.options.etcdName, medianValues(got[i].rounds))
		}
	}
	for i, a := range m.variants {
		if a.isReference() {
			continue
		}
		params := maps.Clone(m.params)
		if params == nil {
			params = make(map[string]any)
		}
		params["log"], params["clients are"] = a.name, a.at
		b.records = append(b.records, got[i].newRecord(figures.Record{Measure: m.name, Params: params,
			Reference: reference}, medianValues(got[i].rounds)))
	}
}
