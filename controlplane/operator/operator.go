// Package operator serves the HTTP API below /cluster, with which operators inspect and change a
// cluster: status, members, certificates, keys, join tokens, backups and support bundles. The API
// server authenticates and authorizes each request before it reaches this package. Every change is
// logged with the name of the user (type operation).
package operator

import (
	"context"
	"crypto/x509"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/internal/logtail"
	"keelson.dev/keelson/raftstore"
)

// Store is the part of the replicated store that operators inspect and change. *replica.Replica
// implements it.
type Store interface {
	// Status returns the state of this replica's store.
	Status() raftstore.Status
	// Sync returns the store's revision after this replica has applied everything that was
	// committed before the call.
	Sync(ctx context.Context) (raftstore.Revision, error)
	// StepDown transfers leadership to the member with the name to, or to any suitable member if to
	// is empty. It returns the name of the new leader.
	StepDown(ctx context.Context, to string) (leader string, err error)
	// Compact discards the watch history up to and including the revision upTo. It returns
	// raftstore.ErrNotLeader on a replica that is not the leader.
	Compact(ctx context.Context, upTo raftstore.Revision) error
}

// Backups makes and reads backups of the store.
type Backups interface {
	// Writer returns a function that writes a backup. If there are recipients, the backup is
	// encrypted with age for them. The error means that a recipient is invalid.
	Writer(recipients []string) (write func(context.Context, io.Writer) error, err error)
	// Describe reads and verifies a whole backup, and describes its contents.
	Describe(r io.Reader) (api.ClusterBackup, error)
}

// Peers sends requests to the API of other replicas, with the client certificate of this replica.
// The argument peer is the peer address of the other replica.
type Peers interface {
	// GetFromPeer sends a GET request. Its timeout is short, so the other replica must answer
	// without waiting.
	GetFromPeer(ctx context.Context, peer, path string) (*http.Response, error)
	// SendRequest sends any request. It has no timeout except the end of ctx. headers contains
	// further headers as alternating names and values.
	SendRequest(ctx context.Context, method, peer, path string, body []byte, headers ...string) (*http.Response, error)
}

// Members adds, removes and finds the members of the cluster.
type Members interface {
	// AddMember adds a replica to the cluster: as a standby without a vote if standby is true, and
	// otherwise as a voter.
	AddMember(ctx context.Context, name, address string, standby bool) error
	// RemoveMember removes a member at the request of a user, and records which keys it had.
	RemoveMember(ctx context.Context, name, user string) error
	// FindMember returns the member with the given name from the committed raft configuration. If
	// there is no such member, the error has the HTTP status 404. If the store records when and why
	// the member was removed, the error contains this.
	FindMember(ctx context.Context, name string) (raftstore.Member, error)
	// ListRemovedWithValidKeys returns the removed members that had a key which a replica in
	// reports still uses or trusts.
	ListRemovedWithValidKeys(ctx context.Context, reports []api.ClusterKeyHolder) ([]api.ClusterRemoved, error)
	// DismissRemovedMember deletes the record of a removed member.
	DismissRemovedMember(ctx context.Context, name string) error
}

// Keys returns and rotates the keys that all replicas of the cluster share.
type Keys interface {
	// Report returns the keys of all members and the last rotation. If linearizable, the rotation
	// includes all changes that were committed before the call.
	Report(ctx context.Context, linearizable bool) (api.ClusterKeys, error)
	// OwnReport returns the keys of this replica.
	OwnReport() api.ClusterKeyHolder
	// Request starts, forces or aborts a rotation, as q requests, on behalf of user.
	Request(ctx context.Context, q api.ClusterRotate, user string) error
}

// NodeCertificate describes a certificate of a node.
type NodeCertificate struct {
	Node, Use, Key           string
	Starts, Expires, Renewal time.Time
	// Reported is true if the agent reported the certificate itself. Otherwise this replica
	// observed the certificate on a connection, and the agent may have renewed it since.
	Reported bool
}

// Nodes contains the functions of the node gateway that operators use.
type Nodes interface {
	// Heartbeats returns the time of the last heartbeat of each node with a session on this
	// replica.
	Heartbeats() map[string]time.Time
	// Certificates returns the certificates of the nodes with a connection to this replica.
	Certificates() []NodeCertificate
	// Revoke revokes the certificates of a node.
	Revoke(ctx context.Context, node string) error
}

// Replica provides the state of the other packages of this replica. All methods are safe for
// concurrent use.
type Replica interface {
	// DescribeCluster adds the state of the cluster, the state of the leader's work, and this
	// replica's alarms to s. The caller has already added the state of the store.
	DescribeCluster(s *api.ClusterStatus)
	// DescribeSelf adds this replica's own state to m, which is its entry in a status.
	DescribeSelf(m *api.ClusterMember)
	// LastContact returns the time at which the replica with the given name last responded, or the
	// zero time if it never did.
	LastContact(name string) time.Time
	// ReadinessError returns the reason why the replica with the given name is not ready, or nil if
	// it is ready.
	ReadinessError(name string) error
	// CheckAlarms returns the alarms that follow from s, a status that contains the reports of all
	// members.
	CheckAlarms(s api.ClusterStatus) []api.ClusterAlarm
}

// Config configures an API. All fields are required, except that Self.Recent may be nil.
type Config struct {
	Cluster datadir.Cluster
	Self    Self
	CA      *pki.ClusterCA
	Tokens  pki.TokenKey // key of the MAC in join token Secrets
	// AuthenticatedBy reports whether the user u authenticated with the client certificate leaf.
	AuthenticatedBy func(u api.User, leaf *x509.Certificate) bool
	Log             *slog.Logger

	Certificates *OwnCertificates
	// Unreadable returns the stored objects that cannot be decoded.
	Unreadable func() []registry.Unreadable

	Store   Store
	Backups Backups
	Peers   Peers
	Members Members
	Keys    Keys
	Nodes   Nodes
	Replica Replica
}

// Self describes this replica: its name, address, release and settings.
type Self struct {
	Name, Advertise, Version string
	Flags                    map[string]string // the command line flags, for support bundles
	Recent                   *logtail.Lines    // the last log messages, for support bundles; may be nil
	HeartbeatTimeout         time.Duration     // heartbeat timeout of raft
	// MaxVerifyBytes is the maximum size of a backup that this replica verifies. The backup is
	// decoded in memory.
	MaxVerifyBytes int64
}

// API serves the HTTP endpoints below /cluster of one replica. All methods are safe for
// concurrent use, except SetClient, which must return before requests are served.
type API struct {
	config    Config
	client    *client.Client
	verifying sync.Mutex // held while a backup is verified
}

// New returns the API of a replica.
func New(config Config) *API { return &API{config: config} }

// SetClient sets the API client. It is not part of the Config, because the API server is created
// later and serves this API.
func (v *API) SetClient(c *client.Client) { v.client = c }

// Handlers returns the HTTP handlers by path. A path that ends in a slash also matches all paths
// below it.
func (v *API) Handlers() map[string]http.Handler {
	return map[string]http.Handler{
		api.PathClusterStatus:        http.HandlerFunc(v.serveStatus),
		api.PathClusterHeartbeats:    http.HandlerFunc(v.serveHeartbeats),
		api.PathClusterCertificates:  http.HandlerFunc(v.serveCertificates),
		api.PathClusterKeys:          v.logOperation("rotate", v.serveKeys),
		api.PathClusterKubeconfig:    v.logOperation("renew", v.serveKubeconfig),
		api.PathClusterTokens:        v.logOperation("token create", v.serveTokens),
		api.PathClusterRevoke:        v.logOperation("revoke", v.serveRevoke),
		api.PathClusterMembers:       v.logOperation("member add", v.serveMembers),
		api.PathClusterMembers + "/": v.logOperation("member remove", v.serveMember),
		api.PathClusterStepDown:      v.logOperation("step-down", v.serveStepDown),
		api.PathClusterCompact:       v.logOperation("compact", v.serveCompact),
		api.PathClusterBackup:        v.logOperation("backup", v.serveBackup),
		api.PathClusterVerify:        http.HandlerFunc(v.serveVerify),
		api.PathClusterSupport:       v.logOperation("support", v.serveSupport),
	}
}
