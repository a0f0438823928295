// Package keyrotation rotates the keys that all replicas of a cluster share, while the replicas
// serve: the cluster CA, the CA of the connections between replicas, the service account key, and
// the encryption key of the store.
//
// A rotation is one record in the store. The pure functions of package rotation decide which step
// follows. Every replica watches the record and performs its step on its own disk (follower). The
// leader requests the keys of all replicas and commits the next step (Rotator.Lead). DESIGN.md
// describes the guarantees and invariants.
package keyrotation

import (
	"context"
	"crypto/x509"
	"log/slog"
	"path/filepath"
	"sync"
	"sync/atomic"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/keyrotation/rotation"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/wakeup"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
)

// Store is the part of the replicated store that key rotation uses. *replica.Replica implements it.
type Store interface {
	raftstore.Store
	// Status returns the members and the leader according to the log entries that this replica has
	// applied.
	Status() raftstore.Status
	// Ready reports whether this replica has a leader and has applied all entries that the leader
	// had committed.
	Ready() bool
	// HoldMembers calls decide. No replica can become a member during the call.
	HoldMembers(ctx context.Context, decide func(context.Context, []replica.MemberLevel) error) error
	// StepDown transfers the leadership to the member with the name to, or to any suitable member
	// if to is empty. It returns the name of the new leader.
	StepDown(ctx context.Context, to string) (leader string, err error)
	// Rewrite encrypts all files of this replica's store with the current encryption key.
	Rewrite(ctx context.Context) error
}

// Replica contains the functions of other packages of a replica that key rotation uses. Package
// server implements it. All methods are safe for concurrent use.
type Replica interface {
	// FetchOwnKeys returns the keys of the replica at the peer address peer, as that replica
	// reports them. The text of an error is a short reason that names neither the replica nor the
	// request.
	FetchOwnKeys(ctx context.Context, peer string) (api.ClusterKeys, error)
	// FetchClusterKeys returns the keys of all members, as the replica at the peer address peer
	// reports them.
	FetchClusterKeys(ctx context.Context, peer string) (api.ClusterKeys, error)
	// NodeKeys returns the nodes with a session on this replica and the CAs that they trust, sorted
	// by the nodes' names.
	NodeKeys() []api.ClusterNodeKeys
	// RequireLevel returns an error that wraps datadir.ErrLevelTooLow if the cluster's feature
	// level is below level. The error names the feature.
	RequireLevel(ctx context.Context, feature string, level uint32) error
	// ReconnectPeers makes new connections to other replicas use the current CA and certificate.
	ReconnectPeers()
}

// Config configures a Rotator. All fields are required.
type Config struct {
	Name    string // name of this replica
	DataDir string // data directory of this replica
	Cluster string // name of the cluster
	Trust   *pki.Trust
	CA      *pki.ClusterCA
	Tokens  *pki.ServiceTokens
	Secrets *SecretFiles
	Store   Store
	Replica Replica
	Log     *slog.Logger
}

// Rotator performs rotations on one replica, and leads them while the replica is the raft leader.
// All methods are safe for concurrent use, except that SetClient must return before Run is called.
type Rotator struct {
	config Config
	keys   *follower

	// set by SetClient
	client    *client.Client
	informers *client.Informers

	stale      atomic.Pointer[StaleKeys] // nil if the keys of this replica agree with those of the other replicas
	frontProxy atomic.Pointer[pki.CA]

	kubeconfigMutex sync.Mutex // held while the administrator's kubeconfig is checked and replaced
	// The CA and pool that applyClusterCA has applied. Only the follower's goroutine uses them.
	appliedCA   *x509.Certificate
	appliedPool *x509.CertPool
}

// New returns a Rotator that has not been started. It loads the front proxy CA of config.Trust.
func New(config Config) (*Rotator, error) {
	front, err := config.Trust.FrontProxyCA()
	if err != nil {
		return nil, err
	}
	r := &Rotator{config: config}
	r.frontProxy.Store(front)
	r.keys = &follower{
		store: config.Store, folder: filepath.Join(config.DataDir, datadir.PKIFolder),
		trust: config.Trust, ca: config.CA,
		applyClusterCA: r.applyClusterCA, tokens: config.Tokens, secrets: config.Secrets,
		rewriteStore: config.Store.Rewrite, log: config.Log, changed: wakeup.New(),
	}
	if own := datadir.KeyFile(config.DataDir); config.Secrets.options.Keys == own {
		r.keys.keyFile = own
	}
	r.keys.current.Store(&rotation.Record{})
	return r, nil
}

// SetClient sets the API client and the informers. They are not parameters of New, because the API
// server is created after the Rotator: it calls ObserveClient.
func (r *Rotator) SetClient(c *client.Client, informers *client.Informers) {
	r.client, r.informers = c, informers
}

// Run performs every step of a rotation on the files of this replica until ctx ends.
func (r *Rotator) Run(ctx context.Context) error { return r.keys.Run(ctx) }

// HeldKeys returns the keys of each kind that this replica has.
func (r *Rotator) HeldKeys() []api.ClusterKeyHeld { return r.keys.allKeys() }

// LoadTrust reads this replica's keys and trusted CAs from its data directory. It waits for a step
// of a rotation that is changing the files, so it never returns a partly applied step.
func (r *Rotator) LoadTrust() (*pki.Trust, error) { return r.keys.loadTrust() }

// ObserveClient records the user of a client certificate if the previous cluster CA has signed the
// certificate. It does so only while a rotation of the cluster CA waits for the users of that CA.
func (r *Rotator) ObserveClient(leaf *x509.Certificate) { r.keys.observeClient(leaf) }

// FrontProxyCA returns the CA that signs this replica's client certificate for aggregated APIs.
func (r *Rotator) FrontProxyCA() *pki.CA { return r.frontProxy.Load() }

// SignSecretToken returns a token of a service account that is bound to the Secret with the name
// secret.
func (r *Rotator) SignSecretToken(account *v1.ServiceAccount, secret string) (string, error) {
	return r.config.Tokens.SignForSecret(pki.SecretClaims{
		Namespace: account.Namespace, ServiceAccount: pki.Ref{Name: account.Name, UID: string(account.UID)},
		Secret: secret,
	})
}

// ClusterCAs returns the certificates of the trusted cluster CAs. The first is that of the signing
// CA.
func (r *Rotator) ClusterCAs() []*x509.Certificate {
	signing := r.config.CA.SigningCA().Cert
	all := []*x509.Certificate{signing}
	for _, c := range r.config.CA.TrustedCerts() {
		if !c.Equal(signing) {
			all = append(all, c)
		}
	}
	return all
}

// asAPIServer returns a copy of the client that has the identity of the API server.
func asAPIServer(c *client.Client) *client.Client {
	return c.As(api.User{Name: api.UserAPIServer, Groups: []string{api.GroupMasters, api.GroupAuthenticated}})
}
