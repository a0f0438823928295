package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/bench/figures"
	"keelson.dev/keelson/test/testenv/stream"
)

const (
	failoverAgents   = 20
	failoverPatience = 2 * time.Minute // for everything to be seen after one kill
	// failoverRest is for how long the load runs undisturbed before each kill.
	failoverRest = 700 * time.Millisecond
)

// A point of a kill: what is timed from the moment a new leader is elected, in milliseconds.
const (
	pointController = "first pod of a controller"
	pointBinding    = "first binding"
	pointStatus     = "first status of an agent"
	pointSessions   = "last session of the dead one's agents"
	pointWrites     = "no write at survivors" // from kill to the end of the pause, which is not timed from the election
	pointWatches    = "watches of the dead one go on"
	pointElected    = "kill until a leader is elected"
)

var points = []struct{ name, key string }{
	{pointElected, ""}, {pointWrites, ""}, {pointController, "failover controller"}, {pointBinding, "failover binding"},
	{pointStatus, "failover status"}, {pointSessions, "failover sessions"}, {pointWatches, "failover watches"},
}

// failover kills the leader's process under load, again and again, and tells how long after the election of the next one
// each part goes on.
func (b *bench) failover(ctx context.Context) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	b.Say("three replicas, each a process, and %d agents", failoverAgents)
	p, err := startPlane(ctx, b.memory)
	if err != nil {
		cancel()
		return err
	}
	l := &failoverLoad{plane: p}
	defer func() {
		cancel()
		l.wait()
		err = errors.Join(err, p.stop())
	}()
	if err := l.start(ctx, failoverAgents); err != nil {
		return err
	}
	found, soon := map[string][]float64{}, 0
	for i := range b.kills {
		one, err := l.killed(ctx)
		if err != nil {
			return fmt.Errorf("kill %d: %w", i+1, err)
		}
		if inTime(one) {
			soon++
		}
		for name, ms := range one {
			found[name] = append(found[name], ms)
		}
		b.Say("kill %d of %d: elected after %.0f ms; then pod %.0f, binding %.0f, status %.0f, sessions %.0f, watches %.0f ms", i+1, b.kills,
			one[pointElected], one[pointController], one[pointBinding], one[pointStatus], one[pointSessions], one[pointWatches])
	}
	l.end()
	seen, err := l.Verdict(ctx)
	if err != nil {
		return err
	}
	b.failoverRows(found, soon, seen)
	return nil
}

func (b *bench) failoverRows(found map[string][]float64, soon int, seen stream.Seen) {
	params := map[string]any{"kills": b.kills, "agents": failoverAgents, "applies": stream.Writers}
	for _, p := range points {
		values := found[p.name]
		if len(values) == 0 {
			continue
		}
		sorted := slices.Clone(values)
		rec := figures.Record{Measure: "failover, " + p.name, Params: params, Samples: values, Values: map[string]float64{
			"p50_ms": figures.Quantile(sorted, 0.5), "p99_ms": figures.Quantile(sorted, 0.99), "max_ms": figures.Quantile(sorted, 1)}}
		b.Records = append(b.Records, rec)
		note := fmt.Sprintf("p50 %.0f, max %.0f ms of %d kills", rec.Values["p50_ms"], rec.Values["max_ms"], len(values))
		b.Row(figures.Row{Measure: "leader killed: " + p.name + ", p99", Key: p.key, Figure: rec.Values["p99_ms"], Unit: "ms", Note: note})
	}
	if writes := slices.Clone(found[pointWrites]); len(writes) > 0 {
		b.Row(figures.Row{Measure: "leader killed: writes stand still, median", Key: "failover writes", Figure: figures.Quantile(writes, 0.5), Unit: "ms",
			Note: fmt.Sprintf("max %.0f ms of %d kills; controllers, scheduler and sessions went on within %d ms of the election in %d of %d",
				figures.Quantile(writes, 1), len(writes), resumeBound, soon, len(writes))})
	}
	for _, c := range []struct {
		name, note string
		n          int
	}{
		{"calls at survivors that failed", fmt.Sprintf("of %d", seen.Calls), seen.Failed},
		{"watches of survivors that ended", "", seen.Broken},
		{"events that a watch missed, had twice or out of order", fmt.Sprintf("of %d, in %d watches", seen.Events, seen.Watches), seen.Wrong},
		{"acknowledged writes that are lost", fmt.Sprintf("of %d", seen.Acked), seen.Lost},
		{"reads and writes that contradict what was known before", fmt.Sprintf("of %d", seen.Reads+seen.Acked), seen.Stale},
	} {
		b.Records = append(b.Records, figures.Record{Measure: "failover, " + c.name, Params: params, Values: map[string]float64{"count": float64(c.n)}})
		b.Row(figures.Row{Measure: "leader killed: " + c.name, Key: "failover none", Figure: float64(c.n), Note: c.note})
	}
}

// resumeBound is how soon after an election everything is to go on, in milliseconds.
const resumeBound = 200

// inTime says whether the first pod of a controller, the first binding and the last session, where there were any, all came
// within resumeBound.
func inTime(of map[string]float64) bool {
	return of[pointController] <= resumeBound && of[pointBinding] <= resumeBound && of[pointSessions] <= resumeBound
}

// killed kills the leader once and times what follows. Everything is whole again when it returns.
func (l *failoverLoad) killed(ctx context.Context) (map[string]float64, error) {
	if err := l.allReady(ctx); err != nil {
		return nil, err
	}
	leader, err := l.Leader(ctx)
	if err != nil {
		return nil, err
	}
	if err := wait.Delay(ctx, failoverRest); err != nil {
		return nil, err
	}
	logs, err := l.logsFrom(leader)
	if err != nil {
		return nil, err
	}
	served := l.agentsAt(leader)
	l.Strike(leader)
	at := time.Now()
	back, err := l.processes.Kill(leader)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, failoverPatience)
	defer cancel()
	out := map[string]float64{}
	var elected time.Time
	err = wait.For(ctx, 10*time.Millisecond, func() (err error) {
		if elected.IsZero() {
			if elected, err = logs.elected(); err != nil {
				return err
			}
		}
		return l.resumed(out, elected, served)
	})
	if err != nil {
		return nil, err
	}
	out[pointElected] = ms(elected.Sub(at))
	out[pointWrites] = ms(l.Pause(at))
	back()
	err = l.allReady(ctx)
	l.Strike("")
	return out, err
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// resumed fills in when each part went on, and fails while one has not.
func (l *failoverLoad) resumed(out map[string]float64, elected time.Time, served []*failoverAgent) error {
	first, ok := l.pods.after(elected)
	if !ok {
		return errors.New("the work of a new leader has not been seen yet")
	}
	for i, name := range []string{pointController, pointBinding, pointStatus} {
		out[name] = ms(first[i].Sub(elected))
	}
	last := time.Time{}
	for _, a := range served {
		opened, ok := a.openedAfter(elected)
		if !ok {
			return fmt.Errorf("agent %s has no session yet", a.name)
		}
		if opened.After(last) {
			last = opened
		}
	}
	if !last.IsZero() { // otherwise no agent was at the dead one
		out[pointSessions] = max(0, ms(last.Sub(elected)))
	}
	again, waits := l.Resumed()
	if waits {
		return errors.New("a watch of the dead replica has not gone on yet")
	}
	out[pointWatches] = max(0, ms(again.Sub(elected)))
	return nil
}

// logs are those of the survivors, from a moment on.
type logs map[string]int64

func (l *failoverLoad) logsFrom(leader string) (logs, error) {
	out := logs{}
	for _, name := range l.Names {
		if name == leader {
			continue
		}
		path := filepath.Join(l.dir, name+".log")
		s, err := os.Stat(path)
		if err != nil {
			return nil, err
		}
		out[path] = s.Size()
	}
	return out, nil
}

// elected is when one of them became the leader, as its log says.
func (l logs) elected() (time.Time, error) {
	for path, from := range l {
		f, err := os.Open(path)
		if err != nil {
			return time.Time{}, err
		}
		_, err = f.Seek(from, 0)
		var at time.Time
		for s := bufio.NewScanner(f); err == nil && s.Scan(); {
			if line := s.Text(); strings.Contains(line, `msg="role changed"`) && strings.Contains(line, "to=leader") {
				stamp, _, _ := strings.Cut(strings.TrimPrefix(line, "time="), " ")
				at, err = time.Parse(time.RFC3339Nano, stamp)
			}
		}
		f.Close()
		if err != nil || !at.IsZero() {
			return at, err
		}
	}
	return time.Time{}, errors.New("no survivor leads yet")
}
