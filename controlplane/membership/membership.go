// Package membership decides and records which replicas are members of a cluster, that is, of its
// raft configuration. It creates clusters, joins and removes replicas, and replaces dead voters by
// standbys, which are members without a vote. It refuses connections and requests of replicas that
// are not members. It also refuses replicas of an earlier incarnation of the cluster: these have
// data from before a recovery or a restore. Finally, it raises the feature level of the cluster.
// The level is the newest format of stored data that the releases of all members can read.
package membership

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/clusterid"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
)

// Store is the part of the replicated store that membership uses. *replica.Replica implements it.
type Store interface {
	raftstore.Store
	// Status returns the state of the raft cluster, as this replica has observed it. The list of
	// members comes from the log entries that this replica has applied, and may be out of date.
	Status() raftstore.Status
	// Ready reports whether this replica has a leader, has applied all log entries that were
	// committed when it started, and has a disk that responds.
	Ready() bool
	// AddMember adds a replica as a voter.
	AddMember(ctx context.Context, id, address string) error
	// AddLearner adds a replica as a standby: a member that receives the log and has no vote.
	AddLearner(ctx context.Context, id, address string) error
	// RemoveMember removes a member. It returns raftstore.ErrNoMajority if the remaining voters
	// have no quorum.
	RemoveMember(ctx context.Context, id string) error
	// RemoveSilent removes a voter that does not respond. It works on the leader only. It returns
	// raftstore.ErrInvalid if the voter responds.
	RemoveSilent(ctx context.Context, id string) error
	// PromoteOnLeader gives a vote to a standby. It works on the leader only.
	PromoteOnLeader(ctx context.Context, id string) error
	// RequestReports requests the state of every member. commit is the index of the last log entry
	// that was committed before the requests. RequestReports works on the leader only.
	RequestReports(ctx context.Context) (found []replica.MemberReport, commit uint64, err error)
	// HoldMembers requests the feature level that each member supports, and calls decide with the
	// responses. Until decide returns, no member is added or promoted. HoldMembers works on the
	// leader only.
	HoldMembers(ctx context.Context, decide func(context.Context, []replica.MemberLevel) error) error
}

// Keys is the part of the key rotation of a replica that membership uses. All methods are safe for
// concurrent use.
type Keys interface {
	// HeldKeys returns the IDs of the shared keys that this replica signs with or trusts, for each
	// kind of key.
	HeldKeys() []api.ClusterKeyHeld
	// LoadTrust reads from disk the CAs, keys and secrets of the cluster, which a joining replica
	// receives.
	LoadTrust() (*pki.Trust, error)
	// CompareWithPeer returns an error if another member has newer keys than this replica. peer is
	// the peer address of the member.
	CompareWithPeer(ctx context.Context, peer string) error
}

// Config is the configuration of a Membership. All fields are required, unless the comment of a
// field explains its zero value.
type Config struct {
	Dir              datadir.Dir
	Cluster          datadir.Cluster
	Trust            *pki.Trust
	Version          string             // the release of this replica
	SharedAddress    string             // virtual IP address of the API; may be empty
	ReplaceDeadAfter time.Duration      // time without a response after which a standby replaces a voter; 0 means never
	TLS              func() *tls.Config // returns the TLS configuration of connections to other replicas
	// AuditRemoval adds the removal of a dead replica to the audit log, as a request of user. err
	// is the error of the removal, or nil if the removal succeeded.
	AuditRemoval func(user, name, reason string, err error)
	Log          *slog.Logger
}

// Membership manages the membership of one replica in its cluster. All methods are safe for
// concurrent use, except SetStore and SetKeys: these must return before any other method is called.
type Membership struct {
	config     Config
	store      Store
	keys       Keys
	peers      *Peers
	authorizer *peerAuthorizer
	level      *Level
	identities *identityChecker

	initialTokens *InitialTokens
	leaveDone     chan struct{} // closed when leaveCluster has returned
	// this replica has not caught up since it joined; after New, only RecordMembers accesses it
	joining bool
	standby atomic.Bool // this replica joined as a standby and has no vote yet
	// why this replica is no longer a member; nil if it is a member, or its removal is not known
	removalReason atomic.Pointer[string]
	replacer      replacer
}

// New returns the Membership of a replica that has not been started. It reads the state in the data
// directory.
func New(config Config) (*Membership, error) {
	r := &Membership{config: config, leaveDone: make(chan struct{})}
	r.replacer.members = r
	members := func() []raftstore.Member { return r.store.Status().Members }
	joining, err := config.Dir.IsJoining()
	if err != nil {
		return nil, err
	}
	hasData, err := config.Dir.HasRaftData()
	if err != nil {
		return nil, err
	}
	if r.initialTokens, err = loadInitialTokens(config.Dir); err != nil {
		return nil, err
	}
	standby, err := config.Dir.JoinedAsStandby()
	if err != nil {
		return nil, err
	}
	r.joining = joining
	r.standby.Store(standby)
	r.identities = newIdentityChecker(config.Dir, config.Cluster)
	r.identities.joining, r.identities.hasNoData = joining || !hasData, !hasData
	r.authorizer = newPeerAuthorizer(config.Dir.Name, members, func() bool {
		return r.store.Ready()
	}, config.Log.With("part", "peer authorizer"))
	r.authorizer.joining = joining
	r.level = &Level{supported: config.Dir.FeatureLevel, release: config.Version, dataDir: config.Dir.Path,
		log: config.Log.With("part", "feature level")}
	r.peers = newPeers(config.Dir.Name, config.Cluster, members, config.TLS, config.Log.With("part", "replicas"))
	r.peers.sharedAddress, r.peers.identities = config.SharedAddress, r.identities
	r.peers.Reconnect()
	return r, nil
}

// SetStore sets the store of this replica. The store is not part of Config, because its own
// configuration contains methods of this Membership.
func (r *Membership) SetStore(store Store) { r.store, r.level.store = store, store }

// SetKeys sets the key rotation of this replica, which is created after the Membership.
func (r *Membership) SetKeys(keys Keys) { r.keys = keys }

// InitialTokens returns the first join tokens of the cluster. The result contains tokens only on
// the replica that created the cluster.
func (r *Membership) InitialTokens() *InitialTokens { return r.initialTokens }

// Peers returns the client for requests to the other replicas.
func (r *Membership) Peers() *Peers { return r.peers }

// Level returns the feature level of the cluster.
func (r *Membership) Level() *Level { return r.level }

// GuardListener wraps the listener and the TLS configuration of the peer port, on which replicas
// exchange raft messages. The result accepts connections only from members.
func (r *Membership) GuardListener(l net.Listener, base *tls.Config) (net.Listener, *tls.Config) {
	return r.authorizer.wrapListener(l), r.authorizer.guardTLS(base)
}

// GuardRequests returns an HTTP middleware that compares the cluster identity in each request with
// the identity of this replica. It refuses requests of other incarnations, that is, from before or
// after a recovery or restore. roots returns the cluster CAs, which verify the client certificates
// of replicas.
func (r *Membership) GuardRequests(roots func() *x509.CertPool) func(http.Handler) http.Handler {
	return r.identities.guardRequests(func(q *http.Request) string { return replicaNameOf(q, roots()) })
}

// Identity returns the cluster ID and the incarnation of this replica's data. Each recovery or
// restore starts a new incarnation. Identity returns false if the incarnation is not known yet,
// such as on a joining replica.
func (r *Membership) Identity() (clusterid.Identity, bool) { return r.identities.ownIdentity() }

// IsStandby reports whether this replica joined as a standby and has no vote yet.
func (r *Membership) IsStandby() bool { return r.standby.Load() }

// CheckMember returns nil unless another replica has responded that this replica was removed. The
// error then contains the reason of the removal.
func (r *Membership) CheckMember() error {
	if reason := r.removalReason.Load(); reason != nil {
		return errors.New(*reason)
	}
	return nil
}

// PrepareStore blocks until the store of this replica may start. If this replica joins without
// data, PrepareStore first removes the old member with its name from the cluster (leaveCluster).
// Then it records the identities of the other replicas (cluster ID and incarnation). WatchIdentity
// later compares them, to detect that a recovery or restore has excluded this replica.
func (r *Membership) PrepareStore(ctx context.Context) error {
	if err := r.leaveCluster(ctx); err != nil {
		return err
	}
	close(r.leaveDone)
	return r.collectIdentities(ctx)
}

// DescribeCluster adds to the cluster status s the incarnation (the number that each recovery or
// restore increments), the feature level, and alarms about running replicas that a recovery or
// restore has excluded. On the leader, it also adds the state of the replacement of dead replicas.
func (r *Membership) DescribeCluster(s *api.ClusterStatus) {
	s.Incarnation, s.FeatureLevel = r.identities.currentIncarnation(), r.level.applied.Load()
	s.Alarms = append(s.Alarms, r.identities.abandonedAlarms(time.Now())...)
	if s.Leader == r.config.Dir.Name {
		s.Autopilot = r.replacer.reportedState()
	}
}

// DescribeSelf sets the fields FeatureLevel and Standby of m, the entry of this replica in the
// cluster status.
func (r *Membership) DescribeSelf(m *api.ClusterMember) {
	m.FeatureLevel, m.Standby = r.level.supported, r.standby.Load() && !m.Voter
}

// AddMember adds a replica to the cluster: as a standby without a vote if standby is true, and
// otherwise as a voter.
func (r *Membership) AddMember(ctx context.Context, name, address string, standby bool) error {
	if standby {
		return r.store.AddLearner(ctx, name, address)
	}
	return r.store.AddMember(ctx, name, address)
}
