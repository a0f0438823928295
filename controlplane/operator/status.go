package operator

import (
	"context"
	"net/http"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/clusterhttp"
	"keelson.dev/keelson/raftstore"
)

// maxStatusBytes is the maximum size of another replica's status.
const maxStatusBytes = 1 << 20

// serveStatus answers GET /cluster/status with the state of every replica. With ?local=true, it
// answers with the state of this replica.
func (v *API) serveStatus(w http.ResponseWriter, req *http.Request) {
	if !requireMethod(w, req, http.MethodGet) {
		return
	}
	local, _ := strconv.ParseBool(req.URL.Query().Get("local"))
	clusterhttp.WriteJSON(w, v.Status(req.Context(), local))
}

// Components returns the ComponentStatuses of the cluster. It collects the state of the other
// replicas for at most clusterhttp.StatusTimeout.
func (v *API) Components(ctx context.Context) []corev1.ComponentStatus {
	return componentStatuses(v.Status(ctx, false))
}

// Status returns the status of the cluster. If local, it describes only this replica. Otherwise it
// also contains the reports of the other replicas.
func (v *API) Status(ctx context.Context, local bool) api.ClusterStatus {
	s := v.config.Store.Status()
	out := api.ClusterStatus{
		Cluster: v.config.Cluster.Name, ID: v.config.Cluster.ID, Answered: v.config.Self.Name,
		Leader: s.Leader, Term: s.Term,
		CommitIndex: s.CommitIndex, Revision: uint64(s.Revision), Compacted: uint64(s.Compacted),
		Keys: s.Keys, Bytes: s.Bytes, HistoryBytes: s.HistoryBytes, Quota: s.Quota,
		Alarms: []api.ClusterAlarm{}, Members: []api.ClusterMember{},
	}
	now := time.Now()
	for _, a := range s.Alarms {
		out.Alarms = append(out.Alarms, describeAlarm(a))
	}
	if unreadable := v.config.Unreadable(); len(unreadable) > 0 {
		out.Alarms = append(out.Alarms, unreadableAlarm(unreadable))
	}
	out.Alarms = append(out.Alarms, expiringAlarms(v.config.Certificates.List(), now)...)
	out.Alarms = append(out.Alarms, overdueAlarms(v.config.Nodes.Certificates(), now)...)
	out.Alarms = append(out.Alarms, electionAlarms(v.config.Self.HeartbeatTimeout, s.Leaders, now)...)
	v.config.Replica.DescribeCluster(&out)
	for _, m := range s.Members {
		out.Members = append(out.Members, v.describeMember(m, s, now))
	}
	if !local {
		v.collectMembers(ctx, &out)
		out.Alarms = append(out.Alarms, outdatedAlarms(out)...)
		out.Alarms = append(out.Alarms, backupAlarms(out)...)
		out.Alarms = append(out.Alarms, v.config.Replica.CheckAlarms(out)...)
	}
	for i := range out.Members {
		if m := &out.Members[i]; m.Applied > 0 && m.Applied < out.CommitIndex {
			m.Lag = out.CommitIndex - m.Applied
		}
	}
	return out
}

// describeMember returns the state of the member m as this replica observes it. s is the state of
// this replica's store.
func (v *API) describeMember(m raftstore.Member, s raftstore.Status, now time.Time) api.ClusterMember {
	out := api.ClusterMember{
		Name: m.ID, Address: m.Address, Voter: m.Voter, Leader: m.ID == s.Leader, Ready: "yes",
		Applied: m.Applied, Contact: -1,
	}
	if m.Contact > 0 {
		out.Contact = max(0, now.UnixMilli()-m.Contact)
	} else if contact := v.config.Replica.LastContact(m.ID); !contact.IsZero() {
		// only the leader's raft reports contacts
		out.Contact = max(0, now.Sub(contact).Milliseconds())
	}
	if m.ID == v.config.Self.Name {
		out.Applied, out.Contact, out.Version, out.Disk, out.Watchers = s.AppliedIndex, 0, v.config.Self.Version,
			s.DiskBytes, s.Watchers
		v.config.Replica.DescribeSelf(&out)
	} else if err := v.config.Replica.ReadinessError(m.ID); err != nil {
		out.Ready = "no: " + err.Error()
	}
	return out
}

// collectMembers adds the reports of the other members to s. It waits for them for at most
// clusterhttp.StatusTimeout.
func (v *API) collectMembers(ctx context.Context, s *api.ClusterStatus) {
	ctx, cancel := context.WithTimeout(ctx, clusterhttp.StatusTimeout)
	defer cancel()
	reports, errs := make([]*api.ClusterStatus, len(s.Members)), make([]error, len(s.Members))
	var pending sync.WaitGroup
	for i, m := range s.Members {
		if m.Name == v.config.Self.Name {
			continue
		}
		pending.Go(func() {
			reports[i], errs[i] = v.fetchStatus(ctx, m.Address)
		})
	}
	pending.Wait()
	addReports(s, reports, errs)
}

// addReports adds the report of each member to s. reports[i] and errs[i] are the response of
// s.Members[i]. A member that did not respond is not ready, even if it was ready at the last probe.
func addReports(s *api.ClusterStatus, reports []*api.ClusterStatus, errs []error) {
	for i, report := range reports {
		if errs[i] != nil {
			s.Members[i].Ready = "no: it does not answer: " + clusterhttp.Reason(errs[i])
		}
		if report == nil {
			continue
		}
		s.CommitIndex = max(s.CommitIndex, report.CommitIndex)
		s.Alarms = append(s.Alarms, nodeAlarms(report)...)
		for _, m := range report.Members {
			if m.Name != s.Members[i].Name || report.Answered != m.Name {
				continue
			}
			to := &s.Members[i]
			to.Applied, to.Contact, to.Version, to.Disk, to.Watchers = max(to.Applied, m.Applied), 0, m.Version,
				m.Disk, m.Watchers
			to.FeatureLevel, to.Backups, to.Standby = m.FeatureLevel, m.Backups, m.Standby && !to.Voter
			to.StaleKeys, to.StaleSince = m.StaleKeys, m.StaleSince
			to.Ready = m.Ready
			if m.Name == s.Leader {
				s.Work, s.Failing, s.Schedulers, s.Autopilot = report.Work, report.Failing, report.Schedulers,
					report.Autopilot
			}
		}
	}
}

func (v *API) fetchStatus(ctx context.Context, peer string) (*api.ClusterStatus, error) {
	resp, err := v.config.Peers.GetFromPeer(ctx, peer, api.PathClusterStatus+"?local=true")
	if err != nil {
		return nil, err
	}
	var s api.ClusterStatus
	if err := clusterhttp.ReadJSON(resp, maxStatusBytes, "its release does not report its status", &s); err != nil {
		return nil, err
	}
	return &s, nil
}
