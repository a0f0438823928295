package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/audit"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/server/autopilot"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/raftstore"
)

// LeastReplaceDeadAfter is the shortest time after which an operator may have a silent replica replaced.
const LeastReplaceDeadAfter = autopilot.Least

const (
	pilotKey     = api.StorageRoot + "keelson.dev/autopilot"
	pilotVersion = 1
	maxReplaced  = 8 // that are told of; the oldest go first
	// pilotUser is who a replacement is recorded for.
	pilotUser      = "keelson:autopilot"
	promoteTimeout = 10 * time.Second
)

// pilotRecord is what lies in the store. Later releases may add fields; a record of a later version is left alone.
type pilotRecord struct {
	Version int                    `json:"version"`
	Pending *autopilot.Replacement `json:"pending,omitempty"`
	Done    []api.ClusterReplaced  `json:"done,omitempty"`
}

// pilot is what the leader tells of the replacement of dead replicas. Safe for concurrent use.
type pilot struct {
	mu       sync.Mutex
	now      *api.ClusterAutopilot // nil while this replica does not lead, or nothing is to be replaced
	replaced int                   // by this replica
}

func (p *pilot) state() *api.ClusterAutopilot {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.now == nil {
		return nil
	}
	out := *p.now
	out.Done = slices.Clone(out.Done)
	return &out
}

// tell is told what is so now, and whether it keeps somebody from being replaced.
func (p *pilot) tell(now *api.ClusterAutopilot, blocked bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if blocked {
		now.Blocked = time.Now().UnixMilli()
		if p.now != nil && p.now.Blocked > 0 {
			now.Blocked = p.now.Blocked
		}
	}
	p.now = now
}

// keepVoters has standbys take the places of voters that are silent, for as long as this replica leads under the fence.
func (r *Replica) keepVoters(ctx context.Context, system *client.Client, fence raftstore.Fence) error {
	after := r.cfg.ReplaceDeadAfter
	if after <= 0 {
		<-ctx.Done()
		return ctx.Err()
	}
	defer r.pilot.tell(nil, false)
	// It looks often enough to see an answer between two silences, and not so often that the look itself is the gap.
	every := min(max(after/20, 200*time.Millisecond), 5*time.Second)
	watch, began, said := autopilot.NewWatch(max(every, time.Second)), time.Now(), ""
	for {
		did, why, err := r.steer(ctx, system, fence, watch, time.Since(began))
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			why = fmt.Sprintf("%s: %v", why, err)
			r.log.Warn("autopilot", "doing", why, "err", err)
		}
		if why != said {
			said = why
			r.log.Info("autopilot", "state", why)
		}
		if did && err == nil {
			continue // what is next is known at once
		}
		if err := wait.Delay(ctx, every); err != nil {
			return err
		}
	}
}

// steer looks around once and does what is to be done.
func (r *Replica) steer(ctx context.Context, system *client.Client, fence raftstore.Fence, watch *autopilot.Watch, now time.Duration) (did bool, why string, err error) {
	round := autopilot.Round{Self: r.cfg.Name, After: r.cfg.ReplaceDeadAfter}
	found, commit, err := r.store.LookAround(ctx)
	if err != nil {
		return false, "looking at the members", err
	}
	round.Commit = commit
	for _, f := range found {
		round.Members = append(round.Members, autopilot.Member{Name: f.ID, Voter: f.Voter, Standby: f.Standby, Heard: f.Heard, Applied: f.Applied, Level: f.Level})
	}
	watch.Look(now, round.Members)
	rec, at, err := r.storedPilot(ctx)
	if err != nil {
		return false, "reading what is under way", err
	}
	if rec.Version > pilotVersion {
		return false, "a later release replaces dead replicas: nothing is done here", nil
	}
	round.Pending = rec.Pending
	if round.Level, err = r.level.stored(ctx, raftstore.ReadOptions{}); err != nil {
		return false, "reading the feature level", err
	}
	d := autopilot.Decide(round)
	r.pilot.tell(&api.ClusterAutopilot{After: r.cfg.ReplaceDeadAfter.Milliseconds(), State: d.Why, Done: rec.Done}, d.Blocked)
	switch d.Act {
	case autopilot.Remove:
		return true, d.Why, r.removeDead(ctx, system, d, rec, at, fence)
	case autopilot.Promote:
		ctx, cancel := context.WithTimeout(ctx, promoteTimeout)
		defer cancel()
		return true, d.Why, r.store.PromoteHere(ctx, d.Standby)
	case autopilot.Forget:
		return true, d.Why, r.endReplacement(ctx, system, round, rec, at, fence)
	}
	return false, d.Why, nil
}

// removeDead records what is about to be done, then takes the dead one out.
func (r *Replica) removeDead(ctx context.Context, system *client.Client, d autopilot.Decision, rec pilotRecord, at raftstore.Revision, fence raftstore.Fence) error {
	rec.Pending = &autopilot.Replacement{Dead: d.Dead, Standby: d.Standby, Voters: d.Voters}
	if err := r.commitRecord(ctx, pilotKey, rec, at, fence); err != nil {
		return err
	}
	// Its keys are worth no more than those of one that an operator removes.
	note, err := r.noteRemoved(ctx, d.Dead, d.Why, r.sharedKeys(), time.Now())
	if err != nil {
		return fmt.Errorf("writing down which keys %s has had: %w", d.Dead, err)
	}
	began := time.Now()
	err = r.store.RemoveSilent(ctx, d.Dead)
	r.takeBack(ctx, note, err)
	r.recordReplaced(d, err, time.Since(began))
	if err == nil {
		r.tellReplaced(ctx, system, v1.EventTypeWarning, "ReplicaRemoved", d.Why)
	}
	return err
}

// recordReplaced has the removal in the audit log and in that of the replica, as if somebody had asked for it.
func (r *Replica) recordReplaced(d autopilot.Decision, err error, took time.Duration) {
	user := api.User{Name: pilotUser}
	_, record := r.auditor.Begin(context.Background(), audit.Origin{URI: api.PathClusterMembers + "/" + d.Dead, Received: time.Now()})
	record.Annotate("audit.keelson.dev/reason", d.Why)
	_ = record.Asked(audit.Attributes{User: user, Sender: user, Verb: "delete", Path: api.PathClusterMembers + "/" + d.Dead, Changes: true})
	outcome, code := "done", http.StatusOK
	if err != nil {
		outcome, code = "failed", http.StatusInternalServerError
		record.Refused(&metav1.Status{Status: metav1.StatusFailure, Message: err.Error()})
	}
	record.Done(code, false)
	r.log.Info("cluster verb", "user", pilotUser, "verb", "member remove", "object", d.Dead, "outcome", outcome, "reason", d.Why, "standby", d.Standby,
		"took", took.Round(time.Millisecond))
}

// endReplacement forgets what was under way, and notes who has the vote where it came to that.
func (r *Replica) endReplacement(ctx context.Context, system *client.Client, round autopilot.Round, rec pilotRecord, at raftstore.Revision, fence raftstore.Fence) error {
	p := *rec.Pending
	voter := func(name string) bool {
		return slices.ContainsFunc(round.Members, func(m autopilot.Member) bool { return m.Name == name && m.Voter })
	}
	done := !voter(p.Dead)
	if done {
		who := p.Standby
		if !voter(who) {
			who = "another replica"
		}
		rec.Done = append(rec.Done, api.ClusterReplaced{Dead: p.Dead, Standby: who, At: time.Now().UnixMilli()})
		rec.Done = rec.Done[max(0, len(rec.Done)-maxReplaced):]
	}
	rec.Pending = nil
	if err := r.commitRecord(ctx, pilotKey, rec, at, fence); err != nil {
		return err
	}
	if done {
		r.pilot.mu.Lock()
		r.pilot.replaced++
		r.pilot.mu.Unlock()
		r.tellReplaced(ctx, system, v1.EventTypeNormal, "ReplicaReplaced", fmt.Sprintf("%s has the vote of %s, which was dead", rec.Done[len(rec.Done)-1].Standby, p.Dead))
	}
	return nil
}

// tellReplaced says in an Event at Service default/kubernetes, which stands for the API, what became of a replica.
func (r *Replica) tellReplaced(ctx context.Context, system *client.Client, kind, why, message string) {
	now := metav1.Now()
	e := &v1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: fmt.Sprintf("kubernetes.%x", now.UnixNano())},
		InvolvedObject: v1.ObjectReference{APIVersion: "v1", Kind: "Service", Namespace: metav1.NamespaceDefault, Name: "kubernetes"},
		Type:           kind, Reason: why, Message: message, Count: 1,
		FirstTimestamp: now, LastTimestamp: now, Source: v1.EventSource{Component: "keelson-controlplane", Host: r.cfg.Name},
	}
	if _, err := client.Create(ctx, system, e); err != nil {
		r.log.Debug("event not written", "reason", e.Reason, "err", err)
	}
}

func (r *Replica) storedPilot(ctx context.Context) (rec pilotRecord, at raftstore.Revision, err error) {
	at, err = r.storedRecord(ctx, pilotKey, "record of replaced replicas", &rec)
	if err == nil && at == 0 {
		rec.Version = pilotVersion
	}
	return rec, at, err
}

// storedRecord reads the record at a key, and the revision at which it was written; 0 when none exists.
func (r *Replica) storedRecord(ctx context.Context, key, what string, rec any) (at raftstore.Revision, err error) {
	it, _, err := r.store.Get(ctx, key, raftstore.ReadOptions{})
	if errors.Is(err, raftstore.ErrNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	if err := json.Unmarshal(it.Value, rec); err != nil {
		return 0, fmt.Errorf("the stored %s (%s): %w", what, key, err)
	}
	return it.Modified, nil
}

// commitRecord writes the record at a key where it is as it was read.
func (r *Replica) commitRecord(ctx context.Context, key string, rec any, at raftstore.Revision, fence raftstore.Fence) error {
	raw, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	op := raftstore.Update(key, raw, at)
	if at == 0 {
		op = raftstore.Create(key, raw)
	}
	_, err = r.store.Commit(ctx, raftstore.Commit{Ops: []raftstore.Op{op}, Fence: fence})
	return err
}

// pilotAlarms tell that a voter is dead and nobody takes its place.
func pilotAlarms(a *api.ClusterAutopilot) []api.ClusterAlarm {
	if a == nil || a.Blocked == 0 {
		return nil
	}
	return []api.ClusterAlarm{{Kind: "autopilot", Since: a.Blocked, Message: a.State,
		Remedy: "start the replica that does not answer, or have a standby caught up: 'keelson-controlplane join --standby' on a further machine makes one"}}
}

var (
	pilotReplaced = prometheus.NewDesc("keelson_autopilot_replacements_total", "Dead replicas whose vote this replica, as leader, gave to a standby.", nil, nil)
	pilotBlocked  = prometheus.NewDesc("keelson_autopilot_blocked", "1 while a dead replica is to be replaced and cannot be; absent where this replica does not lead, or nothing is to be replaced.", nil, nil)
)

// pilotMetrics tell of replacements.
type pilotMetrics struct{ r *Replica }

// Describe implements prometheus.Collector.
func (pilotMetrics) Describe(ch chan<- *prometheus.Desc) { ch <- pilotReplaced; ch <- pilotBlocked }

// Collect implements prometheus.Collector.
func (m pilotMetrics) Collect(ch chan<- prometheus.Metric) {
	m.r.pilot.mu.Lock()
	n := m.r.pilot.replaced
	m.r.pilot.mu.Unlock()
	ch <- prometheus.MustNewConstMetric(pilotReplaced, prometheus.CounterValue, float64(n))
	if now := m.r.pilot.state(); now != nil {
		blocked := 0.0
		if now.Blocked > 0 {
			blocked = 1
		}
		ch <- prometheus.MustNewConstMetric(pilotBlocked, prometheus.GaugeValue, blocked)
	}
}
