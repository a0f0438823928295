package membership

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/membership/autopilot"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/raftstore"
)

const (
	autopilotKey           = api.StorageRoot + "keelson.dev/autopilot"
	autopilotRecordVersion = 1
	maxReplacements        = 8 // maximum number of replacements in the record; the oldest are deleted
	// autopilotUser is the user name under which automatic removals appear in the audit log and in
	// the log of the replica.
	autopilotUser  = "keelson:autopilot"
	promoteTimeout = 10 * time.Second
)

// autopilotRecord is the stored record of replacements of dead voters: the replacement in progress,
// and the last completed replacements. Later releases may add fields. A record with a later version
// is not changed.
type autopilotRecord struct {
	Version int                    `json:"version"`
	Pending *autopilot.Replacement `json:"pending,omitempty"`
	Done    []api.ClusterReplaced  `json:"done,omitempty"`
}

// replacer replaces dead voters with standbys while this replica is the leader. The methods
// reportedState and setState are safe for concurrent use.
type replacer struct {
	members *Membership

	mu sync.Mutex
	// for the cluster status; nil if this replica is not the leader, or does not replace dead
	// voters
	state        *api.ClusterAutopilot
	replacements int // number of replacements that this replica has completed as leader
}

// reportedState returns a copy of the state of automatic replacement, for the cluster status. It
// returns nil if this replica is not the leader, or does not replace dead voters.
func (p *replacer) reportedState() *api.ClusterAutopilot {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.state == nil {
		return nil
	}
	out := *p.state
	out.Done = slices.Clone(out.Done)
	return &out
}

// setState sets the state of automatic replacement for the cluster status. blocked means that a
// dead voter should be replaced, but cannot be. In that case, setState sets state.Blocked to the
// time at which this began.
func (p *replacer) setState(state *api.ClusterAutopilot, blocked bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if blocked {
		state.Blocked = time.Now().UnixMilli()
		if p.state != nil && p.state.Blocked > 0 {
			state.Blocked = p.state.Blocked
		}
	}
	p.state = state
}

// ReplaceDead replaces unresponsive voters by standbys, which are members without a vote, until ctx
// ends. It runs on the leader; fence is its raft term. system is the API client that creates
// Events.
func (r *Membership) ReplaceDead(ctx context.Context, system *client.Client, fence raftstore.Fence) error {
	return r.replacer.replaceWhileLeader(ctx, system, fence)
}

// replaceWhileLeader calls runRound at an interval until ctx ends. If automatic replacement is
// disabled (Config.ReplaceDeadAfter is 0), it only waits for the end of ctx.
func (p *replacer) replaceWhileLeader(ctx context.Context, system *client.Client, fence raftstore.Fence) error {
	replaceAfter := p.members.config.ReplaceDeadAfter
	if replaceAfter <= 0 {
		<-ctx.Done()
		return ctx.Err()
	}
	defer p.setState(nil, false)
	// The interval must be shorter than the time without responses that it measures.
	interval := min(max(replaceAfter/20, 200*time.Millisecond), 5*time.Second)
	tracker, start, logged := autopilot.NewSilenceTracker(max(interval, time.Second)), time.Now(), ""
	for {
		acted, reason, err := p.runRound(ctx, system, fence, tracker, time.Since(start))
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			reason = fmt.Sprintf("%s: %v", reason, err)
			p.members.config.Log.Warn("autopilot failed", "state", reason, "err", err)
		}
		if reason != logged {
			logged = reason
			p.members.config.Log.Info("autopilot", "state", reason)
		}
		if acted && err == nil {
			continue // the next step may be possible immediately
		}
		if err := wait.Delay(ctx, interval); err != nil {
			return err
		}
	}
}

// runRound requests the state of the members once, and performs the action that autopilot.Decide
// returns. elapsed is the time since this replica became the leader. acted reports whether there
// was an action. reason describes the decision.
func (p *replacer) runRound(
	ctx context.Context, system *client.Client, fence raftstore.Fence, tracker *autopilot.SilenceTracker,
	elapsed time.Duration,
) (acted bool, reason string, err error) {
	observation := autopilot.Observation{Leader: p.members.config.Dir.Name,
		ReplaceAfter: p.members.config.ReplaceDeadAfter}
	found, commit, err := p.members.store.RequestReports(ctx)
	if err != nil {
		return false, "requesting the state of the members", err
	}
	observation.CommitIndex = commit
	for _, f := range found {
		observation.Members = append(observation.Members,
			autopilot.Member{Name: f.ID, Voter: f.Voter, Standby: f.Standby,
				Responded: f.Responded, AppliedIndex: f.Applied, FeatureLevel: f.Level})
	}
	tracker.Observe(elapsed, observation.Members)
	rec, revision, err := p.readAutopilotRecord(ctx)
	if err != nil {
		return false, "reading the record of replacements", err
	}
	if rec.Version > autopilotRecordVersion {
		return false, "a later release has written the record of replacements: this replica replaces no voter", nil
	}
	observation.Pending = rec.Pending
	if observation.FeatureLevel, err = p.members.level.readLevel(ctx, raftstore.ReadOptions{}); err != nil {
		return false, "reading the feature level", err
	}
	decision := autopilot.Decide(observation)
	p.setState(&api.ClusterAutopilot{After: p.members.config.ReplaceDeadAfter.Milliseconds(), State: decision.Reason,
		Done: rec.Done}, decision.Blocked)
	switch decision.Action {
	case autopilot.ActionRemove:
		return true, decision.Reason, p.removeDead(ctx, system, decision, rec, revision, fence)
	case autopilot.ActionPromote:
		ctx, cancel := context.WithTimeout(ctx, promoteTimeout)
		defer cancel()
		return true, decision.Reason, p.members.store.PromoteOnLeader(ctx, decision.Standby)
	case autopilot.ActionDeleteRecord:
		return true, decision.Reason, p.finishReplacement(ctx, system, observation, rec, revision, fence)
	}
	return false, decision.Reason, nil
}

// removeDead stores the record of the replacement that decision describes, and then removes the
// dead voter from the raft cluster.
func (p *replacer) removeDead(
	ctx context.Context, system *client.Client, decision autopilot.Decision, rec autopilotRecord,
	revision raftstore.Revision,
	fence raftstore.Fence,
) error {
	rec.Pending = &autopilot.Replacement{Dead: decision.Dead, Standby: decision.Standby, Voters: decision.Voters}
	if err := commitRecord(ctx, p.members.store, autopilotKey, rec, revision, fence); err != nil {
		return err
	}
	// The removed voter still has the shared keys, like any removed replica.
	recorded, err := p.members.recordRemoval(ctx, decision.Dead, decision.Reason,
		heldSharedKeys(p.members.keys, p.members.config.Trust),
		time.Now())
	if err != nil {
		return fmt.Errorf("recording the keys of %s: %w", decision.Dead, err)
	}
	start := time.Now()
	err = p.members.store.RemoveSilent(ctx, decision.Dead)
	p.members.undoRecordedRemoval(ctx, recorded, err)
	p.logRemoval(decision, err, time.Since(start))
	if err == nil {
		p.emitEvent(ctx, system, v1.EventTypeWarning, "ReplicaRemoved", decision.Reason)
	}
	return err
}

// logRemoval adds the automatic removal of a voter to the audit log and to the log of this replica.
// The entries have the same format as those of a removal that an operator requests.
func (p *replacer) logRemoval(decision autopilot.Decision, err error, took time.Duration) {
	p.members.config.AuditRemoval(autopilotUser, decision.Dead, decision.Reason, err)
	outcome := "done"
	if err != nil {
		outcome = "failed"
	}
	p.members.config.Log.Info("cluster verb", "user", autopilotUser, "verb", "member remove", "object",
		decision.Dead, "outcome",
		outcome, "reason", decision.Reason, "standby", decision.Standby,
		"took", took.Round(time.Millisecond))
}

// finishReplacement deletes the replacement in progress from the stored record. If the dead voter
// was removed, it adds the replacement to the completed replacements.
func (p *replacer) finishReplacement(
	ctx context.Context, system *client.Client, observation autopilot.Observation, rec autopilotRecord,
	revision raftstore.Revision,
	fence raftstore.Fence,
) error {
	pending := *rec.Pending
	isVoter := func(name string) bool {
		return slices.ContainsFunc(observation.Members, func(m autopilot.Member) bool {
			return m.Name == name && m.Voter
		})
	}
	removed := !isVoter(pending.Dead)
	if removed {
		successor := pending.Standby
		if !isVoter(successor) {
			successor = "another replica"
		}
		rec.Done = append(rec.Done, api.ClusterReplaced{Dead: pending.Dead, Standby: successor,
			At: time.Now().UnixMilli()})
		rec.Done = rec.Done[max(0, len(rec.Done)-maxReplacements):]
	}
	rec.Pending = nil
	if err := commitRecord(ctx, p.members.store, autopilotKey, rec, revision, fence); err != nil {
		return err
	}
	if removed {
		p.mu.Lock()
		p.replacements++
		p.mu.Unlock()
		p.emitEvent(ctx, system, v1.EventTypeNormal, "ReplicaReplaced",
			fmt.Sprintf("%s has received the vote of the dead replica %s",
				rec.Done[len(rec.Done)-1].Standby, pending.Dead))
	}
	return nil
}

// emitEvent creates an Event about a replacement. The involved object is Service
// default/kubernetes, which represents the API.
func (p *replacer) emitEvent(ctx context.Context, system *client.Client, eventType, reason, message string) {
	now := metav1.Now()
	e := &v1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault,
			Name: fmt.Sprintf("kubernetes.%x", now.UnixNano())},
		InvolvedObject: v1.ObjectReference{APIVersion: "v1", Kind: "Service", Namespace: metav1.NamespaceDefault,
			Name: "kubernetes"},
		Type: eventType, Reason: reason, Message: message, Count: 1,
		FirstTimestamp: now, LastTimestamp: now,
		Source: v1.EventSource{Component: "keelson-controlplane", Host: p.members.config.Dir.Name},
	}
	if _, err := client.Create(ctx, system, e); err != nil {
		p.members.config.Log.Debug("cannot create an event", "reason", e.Reason, "err", err)
	}
}

// readAutopilotRecord returns the record of replacements of dead voters. It also returns the
// record's revision, which is 0 if the store has no record.
func (p *replacer) readAutopilotRecord(ctx context.Context) (
	rec autopilotRecord, revision raftstore.Revision, err error,
) {
	revision, err = readRecord(ctx, p.members.store, autopilotKey, "record of replaced replicas", &rec)
	if err == nil && revision == 0 {
		rec.Version = autopilotRecordVersion
	}
	return rec, revision, err
}

// readRecord decodes the JSON record under key in the store into rec. It returns the revision of
// the record, or 0 if the store has no such record. description names the record in errors.
func readRecord(ctx context.Context, store Store, key, description string, rec any) (
	revision raftstore.Revision, err error,
) {
	item, _, err := store.Get(ctx, key, raftstore.ReadOptions{})
	if errors.Is(err, raftstore.ErrNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	if err := json.Unmarshal(item.Value, rec); err != nil {
		return 0, fmt.Errorf("decoding the stored %s (%s): %w", description, key, err)
	}
	return item.Modified, nil
}

// commitRecord writes rec as JSON under key to the store. It returns a raftstore.ConflictError
// unless the stored record has the given revision. The revision 0 means that the store must have no
// such record.
func commitRecord(
	ctx context.Context, store Store, key string, rec any, revision raftstore.Revision, fence raftstore.Fence,
) error {
	raw, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	op := raftstore.Update(key, raw, revision)
	if revision == 0 {
		op = raftstore.Create(key, raw)
	}
	_, err = store.Commit(ctx, raftstore.Commit{Ops: []raftstore.Op{op}, Fence: fence})
	return err
}

// AutopilotAlarms returns an alarm if a dead voter should be replaced, but cannot be. Otherwise the
// result is empty.
func AutopilotAlarms(a *api.ClusterAutopilot) []api.ClusterAlarm {
	if a == nil || a.Blocked == 0 {
		return nil
	}
	return []api.ClusterAlarm{{Kind: "autopilot", Since: a.Blocked, Message: a.State,
		Remedy: "start the replica that does not answer, or add a standby: run 'keelson-controlplane join --standby' " +
			"on another machine"}}
}

var (
	replacementsMetric = prometheus.NewDesc("keelson_autopilot_replacements_total",
		"Number of dead replicas that this replica, as the leader, has replaced by a standby.", nil, nil)
	blockedMetric = prometheus.NewDesc("keelson_autopilot_blocked",
		"1 while a dead replica should be replaced but cannot be, otherwise 0. Only the leader has this metric, if it "+
			"replaces dead replicas.", nil, nil)
)

// Collector returns a Prometheus collector of the metrics about replacements of dead replicas.
func (r *Membership) Collector() prometheus.Collector { return replacementMetrics{r} }

type replacementMetrics struct{ membership *Membership }

// Describe implements prometheus.Collector.
func (replacementMetrics) Describe(ch chan<- *prometheus.Desc) {
	ch <- replacementsMetric
	ch <- blockedMetric
}

// Collect implements prometheus.Collector.
func (m replacementMetrics) Collect(ch chan<- prometheus.Metric) {
	m.membership.replacer.mu.Lock()
	n := m.membership.replacer.replacements
	m.membership.replacer.mu.Unlock()
	ch <- prometheus.MustNewConstMetric(replacementsMetric, prometheus.CounterValue, float64(n))
	if state := m.membership.replacer.reportedState(); state != nil {
		blocked := 0.0
		if state.Blocked > 0 {
			blocked = 1
		}
		ch <- prometheus.MustNewConstMetric(blockedMetric, prometheus.GaugeValue, blocked)
	}
}
