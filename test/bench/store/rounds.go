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

// bench is one run: its groups while they are up, and what was measured so far.
type bench struct {
	options
	progress progress
	self     string // this program
	dir      string
	groups   map[string]*group // by name
	records  []figures.Record
}

// progress tells the person who waits.
type progress struct {
	to    io.Writer
	began time.Time
	left  time.Duration // of the steps after this one
	step  time.Time     // when this one began
	lasts time.Duration // this one, as estimated
}

func (p *progress) say(format string, args ...any) {
	left := p.left + max(0, p.lasts-time.Since(p.step))
	fmt.Fprintf(p.to, "%5.0fs, about %3.0fs left: %s\n", time.Since(p.began).Seconds(), left.Seconds(), fmt.Sprintf(format, args...))
}

// measure is what is done by turns with each arm.
type measure struct {
	name   string
	params map[string]any
	arms   []arm
	rounds int
	warm   func(ctx context.Context, a arm) error // once before the first round; nil = not needed
	set    func(ctx context.Context, a arm) error // before each round, not metered; nil = not needed
	do     func(ctx context.Context, a arm) (map[string]float64, error)
}

// outcome is what one arm has shown.
type outcome struct {
	rounds []map[string]float64
	cost
}

// cost is what rounds have cost.
type cost struct {
	cpu    map[string]float64 // seconds by process, of all rounds
	busy   float64            // mean of the rounds
	others float64            // the largest of the rounds
	rounds int
}

// metered does one round and adds what it cost. It returns the CPU seconds of
// the arm's processes. One that ends or begins meanwhile is left out.
func (c *cost) metered(a arm, do func() error) (float64, error) {
	var r figures.Record
	began, before := time.Now(), a.spent()
	if err := a.meter().Run(&r, do); err != nil {
		return 0, err
	}
	// The meter knows those that are there all the time; members come and go.
	mine := a.spent() - before + r.CPU[procfs.Self]
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

// record puts values and what they cost into a record.
func (c cost) record(r figures.Record, values map[string]float64) figures.Record {
	r.Values, r.CPU, r.Busy, r.Others = values, c.cpu, c.busy, c.others
	return r
}

// reference is the same as a reference.
func (c cost) reference(name string, values map[string]float64) *figures.Measured {
	return &figures.Measured{Name: name, Values: values, CPU: c.cpu, Busy: c.busy}
}

// run runs the rounds. The machine drifts: within a round every arm has its
// turn, the order turns around from round to round, and figures are medians of
// rounds. Each arm of ours becomes one record, with the reference beside it.
func (b *bench) run(ctx context.Context, m measure) error {
	got := make([]outcome, len(m.arms))
	for _, a := range m.arms {
		if m.warm == nil {
			break
		}
		b.progress.say("%s%s: warming up: %s", m.name, brackets(m.params), a)
		if err := m.warm(ctx, a); err != nil {
			return fmt.Errorf("%s, %s: %w", m.name, a, err)
		}
	}
	for round := range m.rounds {
		for turn := range m.arms {
			at := turn
			if round%2 == 1 {
				at = len(m.arms) - 1 - turn
			}
			a := m.arms[at]
			b.progress.say("%s%s: round %d of %d: %s", m.name, brackets(m.params), round+1, m.rounds, a)
			if m.set != nil {
				if err := m.set(ctx, a); err != nil {
					return fmt.Errorf("%s, %s: %w", m.name, a, err)
				}
			}
			profiles, err := b.profile(a, m, round)
			if err != nil {
				return err
			}
			err = got[at].round(ctx, a, m.do)
			if _, ended := profiles.end(ctx); err == nil {
				err = ended
			}
			if err != nil {
				return fmt.Errorf("%s, %s: %w", m.name, a, err)
			}
		}
	}
	b.keep(m, got)
	return nil
}

// profile begins CPU profiles of our processes, if they are asked for.
func (b *bench) profile(a arm, m measure, round int) (call, error) {
	if b.profiles == "" || !a.inside {
		return nil, nil
	}
	if err := os.MkdirAll(b.profiles, 0o755); err != nil {
		return nil, fmt.Errorf("-profiles: %w", err)
	}
	of := make(map[string]*process)
	for _, member := range a.members {
		of[member.setup.Name] = member.process
	}
	if a.at != inProcess {
		of["clients"] = a.load
	}
	var out call
	for who, proc := range of {
		name := strings.ReplaceAll(fmt.Sprintf("%s %s %s %s %d.prof", m.name, params(m.params), a, who, round+1), " ", "_")
		path, err := filepath.Abs(filepath.Join(b.profiles, strings.ReplaceAll(name, "/", "_")))
		if err != nil {
			return out, err
		}
		w, err := proc.begin(drive.Order{Do: drive.DoProfile, Address: path})
		if err != nil {
			return out, err
		}
		out = append(out, w)
	}
	return out, nil
}

// round runs one round of one arm.
func (o *outcome) round(ctx context.Context, a arm, do func(context.Context, arm) (map[string]float64, error)) error {
	var values map[string]float64
	began, before := time.Now(), a.meter().Processes
	seconds, err := o.metered(a, func() (err error) {
		values, err = do(ctx, a)
		return err
	})
	if err != nil {
		return err
	}
	if n := values["n"]; n > 0 {
		values["cpu_us"] = 1e6 * seconds / n
	}
	if maps.Equal(before, a.meter().Processes) { // else some of it is not known
		values["cores"] = seconds / time.Since(began).Seconds()
	}
	o.rounds = append(o.rounds, values)
	return nil
}

// keep makes records of what the arms have shown.
func (b *bench) keep(m measure, got []outcome) {
	var reference *figures.Measured
	for i, a := range m.arms {
		if a.isReference() {
			reference = got[i].reference(b.etcdName, medians(got[i].rounds))
		}
	}
	for i, a := range m.arms {
		if a.isReference() {
			continue
		}
		params := maps.Clone(m.params)
		if params == nil {
			params = make(map[string]any)
		}
		params["log"], params["clients are"] = a.name, a.at
		b.records = append(b.records, got[i].record(figures.Record{Measure: m.name, Params: params, Reference: reference}, medians(got[i].rounds)))
	}
}
