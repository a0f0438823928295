package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/raftstore"
)

// statusTimeout is how long a status waits for the other replicas' part.
const statusTimeout = time.Second

// serveStatus answers GET /cluster/status; authorization has happened. Every
// replica is asked for what only it knows, unless ?local=true.
func (r *Replica) serveStatus(w http.ResponseWriter, req *http.Request) {
	if !only(w, req, http.MethodGet) {
		return
	}
	local, _ := strconv.ParseBool(req.URL.Query().Get("local"))
	answer(w, r.clusterStatus(req.Context(), local))
}

func (r *Replica) clusterStatus(ctx context.Context, local bool) api.ClusterStatus {
	s := r.store.Status()
	out := api.ClusterStatus{
		Cluster: r.cluster.Name, ID: r.cluster.ID, Incarnation: r.ids.incarnation(), Answered: r.cfg.Name, Leader: s.Leader, Term: s.Term,
		CommitIndex: s.CommitIndex, Revision: uint64(s.Revision), Compacted: uint64(s.Compacted),
		Keys: s.Keys, Bytes: s.Bytes, HistoryBytes: s.HistoryBytes, Quota: s.Quota, FeatureLevel: r.level.seen.Load(),
		Schedulers: r.scheduler.Names(),
		Alarms:     []api.ClusterAlarm{}, Members: []api.ClusterMember{},
	}
	for _, a := range s.Alarms {
		out.Alarms = append(out.Alarms, describeAlarm(a))
	}
	if all := r.registry.Unreadable(); len(all) > 0 {
		out.Alarms = append(out.Alarms, unreadableAlarm(all))
	}
	out.Alarms = append(out.Alarms, expiringAlarms(r.ownCertificates(), time.Now())...)
	out.Alarms = append(out.Alarms, overdueAlarms(r.fleet.Certificates(), time.Now())...)
	out.Alarms = append(out.Alarms, rotationAlarms(*r.keys.seen.Load(), time.Now())...)
	out.Alarms = append(out.Alarms, electionAlarms(r.cfg.Store, s.Leaders, time.Now())...)
	out.Alarms = append(out.Alarms, r.ids.alarms(time.Now())...)
	if s.Leader == r.cfg.Name {
		out.Work, out.Failing = r.work.state()
		out.Autopilot = r.pilot.state()
	}
	for _, m := range s.Members {
		out.Members = append(out.Members, r.describeMember(m, s, time.Now()))
	}
	if !local {
		r.askMembers(ctx, &out)
		out.Alarms = append(out.Alarms, tooOldAlarms(out)...)
		out.Alarms = append(out.Alarms, backupAlarms(out)...)
		out.Alarms = append(out.Alarms, staleAlarms(out)...)
		out.Alarms = append(out.Alarms, pilotAlarms(out.Autopilot)...)
	}
	for i := range out.Members {
		if m := &out.Members[i]; m.Applied > 0 && m.Applied < out.CommitIndex {
			m.Lag = out.CommitIndex - m.Applied
		}
	}
	return out
}

// describeMember says what this replica knows of a member.
func (r *Replica) describeMember(m raftMember, s raftstore.Status, now time.Time) api.ClusterMember {
	out := api.ClusterMember{
		Name: m.ID, Address: m.Address, Voter: m.Voter, Leader: m.ID == s.Leader, Ready: "yes",
		Applied: m.Applied, Contact: -1,
	}
	if m.Contact > 0 {
		out.Contact = max(0, now.UnixMilli()-m.Contact)
	} else if heard := r.peers.heardOf(m.ID); !heard.IsZero() { // raft tells the leader only
		out.Contact = max(0, now.Sub(heard).Milliseconds())
	}
	if m.ID == r.cfg.Name {
		out.Applied, out.Contact, out.Version, out.Disk, out.Watchers = s.AppliedIndex, 0, r.cfg.Version, s.DiskBytes, s.Watchers
		out.FeatureLevel, out.Backups, out.Standby = r.level.own, r.describeBackups(), r.standby.Load() && !m.Voter
		if stale := r.stale.Load(); stale != nil {
			out.StaleKeys, out.StaleSince = stale.Message, stale.Since
		}
		if err := r.ready(context.Background()); err != nil {
			out.Ready = "no: " + err.Error()
		}
	} else if err := r.peers.Problem(m.ID); err != nil {
		out.Ready = "no: " + err.Error()
	}
	return out
}

// askMembers completes a status with what the other members say of themselves.
func (r *Replica) askMembers(ctx context.Context, s *api.ClusterStatus) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	parts, errs := make([]*api.ClusterStatus, len(s.Members)), make([]error, len(s.Members))
	var wg sync.WaitGroup
	for i, m := range s.Members {
		if m.Name == r.cfg.Name {
			continue
		}
		wg.Go(func() {
			parts[i], errs[i] = r.statusOf(ctx, m.Address)
		})
	}
	wg.Wait()
	complete(s, parts, errs)
}

// complete puts what each member says of itself, or that it does not answer, into a status. A member that was ready
// when it was asked last, and does not answer now, is not ready.
func complete(s *api.ClusterStatus, parts []*api.ClusterStatus, errs []error) {
	for i, part := range parts {
		if errs[i] != nil {
			s.Members[i].Ready = "no: it does not answer: " + reason(errs[i])
		}
		if part == nil {
			continue
		}
		s.CommitIndex = max(s.CommitIndex, part.CommitIndex)
		s.Alarms = append(s.Alarms, nodeAlarms(part)...)
		for _, m := range part.Members {
			if m.Name != s.Members[i].Name || part.Answered != m.Name {
				continue
			}
			into := &s.Members[i]
			into.Applied, into.Contact, into.Version, into.Disk, into.Watchers = max(into.Applied, m.Applied), 0, m.Version, m.Disk, m.Watchers
			into.FeatureLevel, into.Backups, into.Standby = m.FeatureLevel, m.Backups, m.Standby && !into.Voter
			into.StaleKeys, into.StaleSince = m.StaleKeys, m.StaleSince
			into.Ready = m.Ready // it has just answered, whatever was known of it before
			if m.Name == s.Leader {
				s.Work, s.Failing, s.Schedulers, s.Autopilot = part.Work, part.Failing, part.Schedulers, part.Autopilot
			}
		}
	}
}

// reason is an error without the request that met it.
func reason(err error) string {
	if errors.Is(err, context.DeadlineExceeded) {
		return "nothing came within " + statusTimeout.String()
	}
	var call *url.Error
	if errors.As(err, &call) {
		err = call.Err
	}
	return err.Error()
}

func (r *Replica) statusOf(ctx context.Context, peer string) (*api.ClusterStatus, error) {
	host, _, err := net.SplitHostPort(peer)
	if err != nil {
		return nil, err
	}
	resp, err := r.peers.get(ctx, datadir.HostPort(host, r.cluster.APIPort), api.PathClusterStatus+"?local=true")
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, errors.New(resp.Status)
	}
	var out api.ClusterStatus
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&out); err != nil {
		return nil, fmt.Errorf("%s: %w", api.PathClusterStatus, err)
	}
	return &out, nil
}

// describeAlarm adds to an alarm what a person should do about it.
func describeAlarm(a raftstore.Alarm) api.ClusterAlarm {
	out := api.ClusterAlarm{Kind: fmt.Sprintf("kind %d", a.Kind), Member: a.Member, Since: a.Since, Message: a.Message}
	switch a.Kind {
	case raftstore.AlarmSpace:
		out.Kind = "space"
		out.Remedy = "delete objects that are not needed, as usual (history gives way by itself), or start every replica " +
			"with a larger --store-quota. New objects are taken again by themselves"
	case raftstore.AlarmDiverged:
		out.Kind = "diverged"
		out.Remedy = fmt.Sprintf("stop %[1]s, run 'keelson-controlplane rebuild' on it and start it again: it takes its data from the others; "+
			"keep the folder that rebuild moves aside and report it", a.Member)
	}
	return out
}

// tooOldAlarms name members that run a release which does not understand what is stored, and cannot tell: one from
// before there were levels does not look for them.
func tooOldAlarms(s api.ClusterStatus) (out []api.ClusterAlarm) {
	for _, m := range s.Members {
		if m.Version == "" || m.FeatureLevel >= s.FeatureLevel {
			continue
		}
		out = append(out, api.ClusterAlarm{
			Kind: "too old", Member: m.Name, Since: time.Now().UnixMilli(),
			Message: fmt.Sprintf("%s runs release %s, which understands feature levels up to %d, and forms of level %d are stored",
				m.Name, m.Version, m.FeatureLevel, s.FeatureLevel),
			Remedy: fmt.Sprintf("stop %s, install the release of the other replicas there and start it again", m.Name),
		})
	}
	return out
}

// unreadableShown bounds how many objects the alarm names.
const unreadableShown = 5

// unreadableAlarm names stored objects that cannot be decoded.
func unreadableAlarm(all []registry.Unreadable) api.ClusterAlarm {
	out := api.ClusterAlarm{Kind: "unreadable", Since: all[0].Seen.UnixMilli()}
	var names []string
	for i, u := range all {
		out.Since = min(out.Since, u.Seen.UnixMilli())
		if i < unreadableShown {
			names = append(names, fmt.Sprintf("%s (%s)", u.Key, u.Reason))
		}
	}
	if more := len(all) - len(names); more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	out.Message = fmt.Sprintf("%d stored objects cannot be read and are left out of lists: %s", len(all),
		strings.Join(names, ", "))
	out.Remedy = all[0].Remedy()
	alike := func(u registry.Unreadable) bool { return (u.Dropped == "") == (all[0].Dropped == "") }
	switch {
	case len(all) > 1 && !slices.ContainsFunc(all, func(u registry.Unreadable) bool { return !alike(u) }):
		out.Remedy += "; the same for the others"
	case len(all) > 1:
		out.Remedy += "; for the others, get each object ('kubectl get'): the error names its remedy"
	}
	return out
}
