package server

import (
	"cmp"
	"context"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/authn"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/keyrotation"
	"keelson.dev/keelson/controlplane/membership"
	"keelson.dev/keelson/controlplane/operator"
	"keelson.dev/keelson/controlplane/recovery"
)

// wireOperator creates the operator API: the HTTP API with which administrators manage the cluster.
// wireReplica sets its API client later, when the API server exists.
func (r *Replica) wireOperator() {
	link := operatorLink{r}
	r.operator = operator.New(operator.Config{
		Cluster: r.cluster,
		Self: operator.Self{Name: r.cfg.Name, Advertise: r.cfg.Advertise, Version: r.cfg.Process.Version,
			Flags:  r.cfg.Process.Flags,
			Recent: r.cfg.Process.RecentLog, HeartbeatTimeout: cmp.Or(r.cfg.Store.Heartbeat, datadir.DefaultHeartbeat),
			MaxVerifyBytes: r.cfg.maxVerifyBytes()},
		CA: r.trust.ca, Tokens: r.trust.shared.TokenKey(), AuthenticatedBy: authn.ProvenBy,
		Log: r.log, Certificates: r.trust.certificates, Unreadable: r.registry.Unreadable,
		Store: r.store,
		Backups: recovery.Backups{Write: r.store.Backup, WriteUnencrypted: r.store.BackupUnencrypted,
			Keyring: r.trust.secrets.Keyring},
		Peers: r.members.Peers(), Members: r.members, Keys: r.trust.keys, Nodes: link, Replica: link,
	})
}

// operatorLink implements operator.Nodes and operator.Replica: it gives the operator API access to
// the other components of the replica.
type operatorLink struct{ r *Replica }

// Heartbeats returns the time of the last heartbeat of each node with a session on this replica. It
// implements operator.Nodes.
func (l operatorLink) Heartbeats() map[string]time.Time { return l.r.nodes.LastHeartbeats() }

// Certificates returns the certificates of the nodes with a connection to this replica. It
// implements operator.Nodes.
func (l operatorLink) Certificates() (all []operator.NodeCertificate) {
	for node, certificates := range l.r.nodes.gateway.NodeCertificates() {
		for _, c := range certificates {
			all = append(all, operator.NodeCertificate{Node: node, Use: c.Use, Key: c.Key, Starts: c.NotBefore,
				Expires: c.NotAfter,
				Renewal: c.RenewsAt(), Reported: c.Reported})
		}
	}
	return all
}

// Revoke revokes the certificates of the node called node. It implements operator.Nodes.
func (l operatorLink) Revoke(ctx context.Context, node string) error {
	return l.r.nodes.gateway.RevokeNode(ctx, node)
}

// DescribeCluster adds the state of the cluster and this replica's alarms to s, the cluster status.
// On the leader, it also adds the state of the leader's work. It implements operator.Replica.
func (l operatorLink) DescribeCluster(s *api.ClusterStatus) {
	r := l.r
	r.members.DescribeCluster(s)
	s.Schedulers = r.leader.scheduler.Names()
	s.Alarms = append(s.Alarms, r.trust.keys.Alarms(time.Now())...)
	if s.Leader == r.cfg.Name {
		s.Work, s.Failing = r.leader.work.State()
	}
}

// DescribeSelf adds this replica's backups, stale keys, readiness and membership to m, its entry in
// the cluster status. It implements operator.Replica.
func (l operatorLink) DescribeSelf(m *api.ClusterMember) {
	r := l.r
	r.members.DescribeSelf(m)
	if r.backups != nil {
		m.Backups = r.backups.Describe()
	}
	if stale := r.trust.keys.StaleKeys(); stale != nil {
		m.StaleKeys, m.StaleSince = stale.Message, stale.Since
	}
	if err := r.checkReady(context.Background()); err != nil {
		m.Ready = "no: " + err.Error()
	}
}

// CheckAlarms returns the alarms about stale keys and about dead voters, which follow from the
// reports of all members in s. It implements operator.Replica.
func (l operatorLink) CheckAlarms(s api.ClusterStatus) []api.ClusterAlarm {
	return append(keyrotation.StaleKeysAlarms(s), membership.AutopilotAlarms(s.Autopilot)...)
}

// LastContact returns when the replica called name was last found to be ready, or the zero time if
// it never was. It implements operator.Replica.
func (l operatorLink) LastContact(name string) time.Time {
	return l.r.members.Peers().LastContact(name)
}

// ReadinessError returns the reason why the replica called name is not ready, or nil if it is
// ready. It implements operator.Replica.
func (l operatorLink) ReadinessError(name string) error {
	return l.r.members.Peers().ReadinessError(name)
}
