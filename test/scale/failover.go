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
	failoverAgents  = 20
	failoverTimeout = 2 * time.Minute // from a kill until all failover points are observed
	// failoverRest is how long the load runs undisturbed before each kill.
	failoverRest = 700 * time.Millisecond
)

// Events after the leader was killed. The time of each is measured in milliseconds since the
// election of the new leader, except for pointWrites and pointElected.
const (
	pointController = "first pod of a controller"
	pointBinding    = "first binding"
	pointStatus     = "first status of an agent"
	pointSessions   = "last session of the dead one's agents"
	pointWrites     = "no write at survivors" // the pause in writes, measured from the kill
	pointWatches    = "watches of the dead one go on"
	pointElected    = "kill until a leader is elected"
)

var failoverPoints = []struct{ name, key string }{
	{pointElected, ""}, {pointWrites, ""}, {pointController, "failover controller"}, {pointBinding, "failover binding"},
	{pointStatus, "failover status"}, {pointSessions, "failover sessions"}, {pointWatches, "failover watches"},
}

// measureFailover kills the leader's process repeatedly under load. It measures how long after the
// next election each activity resumes.
func (b *benchmarks) measureFailover(ctx context.Context) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	b.tally.LogProgress("three replicas in separate processes, and %d agents", failoverAgents)
	p, err := startPlane(ctx, b.options.memory)
	if err != nil {
		cancel()
		return err
	}
	l := &failoverLoad{plane: p}
	defer func() {
		cancel()
		l.awaitEnd()
		err = errors.Join(err, p.stopPlane())
	}()
	if err := l.startLoad(ctx, failoverAgents); err != nil {
		return err
	}
	found, soon := map[string][]float64{}, 0
	for i := range b.options.kills {
		one, err := l.killLeader(ctx)
		if err != nil {
			return fmt.Errorf("kill %d: %w", i+1, err)
		}
		if isInTime(one) {
			soon++
		}
		for name, ms := range one {
			found[name] = append(found[name], ms)
		}
		b.tally.LogProgress("kill %d of %d: elected after %.0f ms; then pod %.0f, binding %.0f, status %.0f, "+
			"sessions %.0f, watches "+
			"%.0f ms", i+1, b.options.kills,
			one[pointElected], one[pointController], one[pointBinding], one[pointStatus], one[pointSessions],
			one[pointWatches])
	}
	l.end()
	seen, err := l.load.Finish(ctx)
	if err != nil {
		return err
	}
	b.addFailoverRows(found, soon, seen)
	return nil
}

func (b *benchmarks) addFailoverRows(found map[string][]float64, soon int, seen stream.Result) {
	params := map[string]any{"kills": b.options.kills, "agents": failoverAgents, "applies": stream.Writers}
	for _, p := range failoverPoints {
		values := found[p.name]
		if len(values) == 0 {
			continue
		}
		sorted := slices.Clone(values)
		rec := figures.Record{Measure: "failover, " + p.name, Params: params, Samples: values,
			Values: map[string]float64{
				"p50_ms": figures.Quantile(sorted, 0.5), "p99_ms": figures.Quantile(sorted, 0.99),
				"max_ms": figures.Quantile(sorted, 1)}}
		b.tally.Records = append(b.tally.Records, rec)
		note := fmt.Sprintf("p50 %.0f, max %.0f ms of %d kills", rec.Values["p50_ms"],
			rec.Values["max_ms"], len(values))
		b.tally.AddRow(figures.Row{Measure: "leader killed: " + p.name + ", p99", Key: p.key,
			Figure: rec.Values["p99_ms"],
			Unit:   "ms", Note: note})
	}
	if writes := slices.Clone(found[pointWrites]); len(writes) > 0 {
		b.tally.AddRow(figures.Row{Measure: "leader killed: pause in writes, median", Key: "failover writes",
			Figure: figures.Quantile(writes, 0.5), Unit: "ms",
			Note: fmt.Sprintf("max %.0f ms of %d kills; controllers, scheduler and sessions resumed within %d ms of "+
				"the election in %d of %d",
				figures.Quantile(writes, 1), len(writes), resumeBound, soon, len(writes))})
	}
	for _, c := range []struct {
		name, note string
		n          int
	}{
		{"calls at survivors that failed", fmt.Sprintf("of %d", seen.Calls), seen.Failed},
		{"watches of survivors that ended", "", seen.Broken},
		{"events that a watch missed, had twice or out of order",
			fmt.Sprintf("of %d, in %d watches", seen.Events, seen.Watches), seen.Wrong},
		{"acknowledged writes that are lost", fmt.Sprintf("of %d", seen.Acked), seen.Lost},
		{"reads and writes that contradict what was known before",
			fmt.Sprintf("of %d", seen.Reads+seen.Acked), seen.Stale},
	} {
		b.tally.Records = append(b.tally.Records, figures.Record{Measure: "failover, " + c.name, Params: params,
			Values: map[string]float64{"count": float64(c.n)}})
		b.tally.AddRow(figures.Row{Measure: "leader killed: " + c.name, Key: "failover none",
			Figure: float64(c.n), Note: c.note})
	}
}

// resumeBound is the target in milliseconds for the time from an election until all activities
// resume.
const resumeBound = 200

// isInTime reports whether the first pod of a controller, the first binding and the last session
// came within resumeBound. points contains the times of the events; a missing event counts as in
// time.
func isInTime(points map[string]float64) bool {
	return points[pointController] <= resumeBound && points[pointBinding] <= resumeBound &&
		points[pointSessions] <= resumeBound
}

// killLeader kills the leader once and returns the time of each event after it (pointController and
// so on). It returns when all replicas are ready again.
func (l *failoverLoad) killLeader(ctx context.Context) (map[string]float64, error) {
	if err := l.plane.awaitAllReady(ctx); err != nil {
		return nil, err
	}
	leader, err := l.plane.Leader(ctx)
	if err != nil {
		return nil, err
	}
	if err := wait.Delay(ctx, failoverRest); err != nil {
		return nil, err
	}
	logOffsets, err := l.survivorLogs(leader)
	if err != nil {
		return nil, err
	}
	served := l.agentsAt(leader)
	l.load.ExpectLoss(leader)
	at := time.Now()
	back, err := l.plane.processes.Kill(leader)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, failoverTimeout)
	defer cancel()
	out := map[string]float64{}
	var elected time.Time
	err = wait.For(ctx, 10*time.Millisecond, func() (err error) {
		if elected.IsZero() {
			if elected, err = logOffsets.electionTime(); err != nil {
				return err
			}
		}
		return l.recordResumeTimes(out, elected, served)
	})
	if err != nil {
		return nil, err
	}
	out[pointElected] = ms(elected.Sub(at))
	out[pointWrites] = ms(l.load.LongestPause(at))
	back()
	err = l.plane.awaitAllReady(ctx)
	l.load.ExpectLoss("")
	return out, err
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// recordResumeTimes sets the time of each event after the election in out. It returns an error
// while an activity has not resumed.
func (l *failoverLoad) recordResumeTimes(out map[string]float64, elected time.Time, served []*sessionRecorder) error {
	first, ok := l.pods.earliestAfter(elected)
	if !ok {
		return errors.New("no pod was created, bound and started by a new leader yet")
	}
	for i, name := range []string{pointController, pointBinding, pointStatus} {
		out[name] = ms(first[i].Sub(elected))
	}
	last := time.Time{}
	for _, a := range served {
		opened, ok := a.openedAfter(elected)
		if !ok {
			return fmt.Errorf("agent %s has no new session yet", a.name)
		}
		if opened.After(last) {
			last = opened
		}
	}
	if !last.IsZero() { // zero if no agent had a session at the killed replica
		out[pointSessions] = max(0, ms(last.Sub(elected)))
	}
	again, waits := l.load.LastResumption()
	if waits {
		return errors.New("a watch of the killed replica has not resumed yet")
	}
	out[pointWatches] = max(0, ms(again.Sub(elected)))
	return nil
}

// logOffsets maps the path of the log file of each survivor, a replica that was not killed, to the
// offset from which to read.
type logOffsets map[string]int64

func (l *failoverLoad) survivorLogs(leader string) (logOffsets, error) {
	out := logOffsets{}
	for _, name := range l.load.Names {
		if name == leader {
			continue
		}
		path := filepath.Join(l.plane.dir, name+".log")
		s, err := os.Stat(path)
		if err != nil {
			return nil, err
		}
		out[path] = s.Size()
	}
	return out, nil
}

// electionTime returns the time at which a surviving replica became the leader, according to its
// log. It returns an error while there is no new leader.
func (l logOffsets) electionTime() (time.Time, error) {
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
	return time.Time{}, errors.New("no surviving replica is the leader yet")
}
