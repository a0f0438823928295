// Package nodegateway is the control plane's side of the fleet protocol: the gRPC service that
// agents connect to. It runs on every replica and has no state of its own that must survive. It
// reads from the shared informers and writes through the API with the identity of the reporting
// node.
//
//	agent ──Session──▶ replica that holds the node's session: objects down, statuses up
//	agent ──Standby──▶ every replica: applied proxy revision up, tunnel requests down
//	agent ──Tunnel───▶ the replica that requested it: exec, attach, logs, port-forward
//
// One goroutine per session sends changes. It drains a set of changed keys and reads the informers'
// present state, so a slow agent costs one set and blocks no other session. Another goroutine reads
// the agent's messages and acknowledges heartbeats.
package nodegateway

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	coordinationv1 "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/clusterid"
	"keelson.dev/keelson/internal/connlimit"
	"keelson.dev/keelson/internal/lifecycle"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// Config is the configuration of a Server. Fields are required unless their comment names a
// default.
type Config struct {
	Replica  string       // the name of this replica
	Listener net.Listener // closed by Run when it ends
	// Connections limits the open connections; default Connections().
	Connections connlimit.Limits
	// TLS must request a client certificate and verify one that is given (VerifyClientCertIfGiven):
	// Enrollment calls have none, Fleet calls require one. The presented chain must include the CA
	// itself, because a joining agent knows the CA by its hash only.
	TLS *tls.Config

	// Client has no user set. The server acts as the reporting node, and as System for its own
	// writes.
	Client    *client.Client
	Informers *client.Informers // New registers its informers here; the caller runs them
	// PodAddresses decides which pod addresses policies may select; nil: all of them.
	PodAddresses *podaddress.Index
	System       api.User // user for session records and lost nodes; default: system:apiserver in system:masters

	Cluster Cluster

	// TokenKey verifies that join tokens belong to this cluster.
	TokenKey pki.TokenKey
	// TokensWait reports whether the join tokens created with the cluster are not stored yet. A
	// client with an unknown token is then asked to retry. nil: never.
	TokensWait func() bool
	// SignNode verifies the CSR and signs a client certificate for CN system:node:NAME, O
	// system:nodes. The certificate is valid from now, or from atLeast if later: earlier
	// certificates are revoked.
	SignNode func(node string, csrDER []byte, atLeast time.Time) (certPEM []byte, err error)
	// SignServing signs a certificate for a node's HTTPS server; seen is the node's address. nil:
	// such requests are refused.
	SignServing func(node string, csrDER []byte, seen netip.Addr) (certPEM []byte, err error)
	// CertificateLife is the validity of certificates signed by SignNode.
	CertificateLife time.Duration
	// CA is the set of authorities that nodes must trust.
	CA Authorities
	// EnrollReplica returns the key material for a new replica and adds it to the raft group. The
	// token has been checked before. nil: replicas are refused.
	EnrollReplica func(ctx context.Context, r *fleetv1.EnrollReplicaRequest) (*fleetv1.EnrollReplicaResponse, error)

	// Replicas returns the list of replicas and a channel that is closed when the list changes.
	Replicas func() ([]*fleetv1.Replica, <-chan struct{})
	// Alive reports whether a replica is reachable from here. It is called on the leader only.
	Alive func(replica string) bool
	// Connected reports whether this replica can commit writes. While it cannot, it does not
	// acknowledge heartbeats, so agents move to another replica. nil: always.
	Connected func() bool

	// Identity returns the cluster identity of this replica, which agents compare with theirs;
	// false while it is unknown. nil: identities are not compared.
	Identity func() (clusterid.Identity, bool)

	// Audit starts the audit event of a request to join or to renew a certificate. It returns a
	// function that completes the event, or an error if the event must be recorded and cannot be.
	// nil: no audit.
	Audit func(Asked) (func(Answered), error)

	Timeline *api.Timeline // receives the stages that agents measure; may be nil
	Log      *slog.Logger  // nil: no logging

	Heartbeat time.Duration // interval sent to agents; default 1 s. This and Suspect are longer in large clusters (paceOf)
	Suspect   time.Duration // silence after which a session ends; default 4 s
	Grace     time.Duration // from the end of the session to Ready=Unknown; default 5 s
	StopGate  time.Duration // maximum wait of a terminating pod for proxies; default 1 s
}

// Cluster is the cluster configuration sent to every node. ClusterCIDR and ServiceCIDR may each
// hold one prefix per IP family, separated by a comma.
type Cluster struct {
	Name, ClusterCIDR, ServiceCIDR, Domain string
}

func (c *Config) defaults() {
	if c.System.Name == "" {
		c.System = api.User{Name: api.UserAPIServer, Groups: []string{api.GroupMasters, api.GroupAuthenticated}}
	}
	if c.Connections == (connlimit.Limits{}) {
		c.Connections = Connections()
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Connected == nil {
		c.Connected = func() bool { return true }
	}
	for _, d := range []struct {
		v *time.Duration
		d time.Duration
	}{{&c.Heartbeat, time.Second}, {&c.Suspect, 4 * time.Second}, {&c.Grace, 5 * time.Second}, {&c.StopGate, time.Second}} {
		if *d.v == 0 {
			*d.v = d.d
		}
	}
}

// Server is the gRPC server for agents on one replica.
type Server struct {
	fleetv1.UnimplementedEnrollmentServer
	fleetv1.UnimplementedFleetServer

	cfg      Config
	view     *view
	gate     *gate
	losses   *losses
	doubts   *losses // timers that end with a suspected node (unheard.go)
	standbys *standbys
	refusals *refusals
	visitors *visitors
	reviews  places[string]     // running reviews by node
	underWay places[nodeMethod] // open streams and calls by node and method
	joins    turns
	spending chan struct{} // semaphore for recording a token use

	deleted   sync.Mutex
	deletions []pki.Revocation // of deleted Nodes, not written yet; guarded by deleted
	deletion  chan struct{}    // signals that deletions has grown; buffered
	tunnels   *tunnels
	events    *eventIndex
	heard     *heard
	used      *used
	leases    cache.Indexer
	services  cache.Indexer
	csiNodes  cache.Indexer

	synced   chan struct{} // closed when the informers hold their initial lists
	stopping chan struct{} // closed when Run ends
	children sync.WaitGroup
}

var (
	_ api.NodeStreams = (*Server)(nil)
	_ api.NodeDialer  = (*Server)(nil)
)

// New returns a server and registers its informers with cfg.Informers. Nothing runs until Run.
func New(cfg Config) *Server {
	cfg.defaults()
	s := &Server{
		cfg: cfg, gate: newGate(cfg.StopGate), standbys: newStandbys(), refusals: newRefusals(cfg.Log),
		visitors: &visitors{byNode: make(map[string]map[*tls.Conn]*x509.Certificate)}, deletion: make(chan struct{}, 1),
		tunnels: newTunnels(), events: newEventIndex(), heard: newHeard(), used: newUsed(),
		joins: make(turns, joinsAtOnce), spending: make(chan struct{}, 1), synced: make(chan struct{}), stopping: make(chan struct{}),
	}
	s.view = newView(cfg.Informers, cfg.PodAddresses, s.gate, cfg.Log)
	s.losses = newLosses(cfg.Log, func(ctx context.Context, node string, epoch uint64) error {
		if s.view.session(node) != nil {
			return nil
		}
		cfg.Log.Info("node lost: its session did not come back", "node", node, "epoch", epoch)
		return markLost(ctx, cfg.Client.As(cfg.System), node, epoch, s.heard.last(node))
	})
	s.doubts = newLosses(cfg.Log, s.doubt)
	s.services = client.Informer[*v1.Service](cfg.Informers).GetIndexer()
	leases := client.Informer[*coordinationv1.Lease](cfg.Informers)
	s.leases = leases.GetIndexer()
	reg, err := leases.AddEventHandler(s.leaseHandler())
	if err != nil {
		panic(fmt.Sprintf("fleet: watch leases: %v", err)) // the informer has not started: this cannot fail
	}
	s.view.handlers = append(s.view.handlers, reg)
	if _, err := client.Informer[*v1.Secret](cfg.Informers).AddEventHandler(s.revocationHandler()); err != nil {
		panic(fmt.Sprintf("fleet: watch Secrets: %v", err)) // the informer has not started: this cannot fail
	}
	if _, err := client.Informer[*v1.Node](cfg.Informers).AddEventHandler(s.nodeHandler()); err != nil {
		panic(fmt.Sprintf("fleet: watch Nodes: %v", err)) // the informer has not started: this cannot fail
	}
	csiNodes := client.Informer[*storagev1.CSINode](cfg.Informers)
	s.csiNodes = csiNodes.GetIndexer()
	if reg, err = csiNodes.AddEventHandler(s.csiNodeHandler()); err != nil {
		panic(fmt.Sprintf("fleet: watch CSINodes: %v", err)) // the informer has not started: this cannot fail
	}
	s.view.handlers = append(s.view.handlers, reg)
	return s
}

// Run serves agents until ctx ends and returns when every session has ended. The informers must be
// running; sessions start when the informers are synced.
func (s *Server) Run(ctx context.Context) error {
	defer s.children.Wait()
	return lifecycle.Run(ctx,
		lifecycle.Part{Name: "fleet: serve", Run: s.serve},
		lifecycle.Part{Name: "fleet: deleted nodes", Run: s.revokeDeleted},
		lifecycle.Part{Name: "fleet: authorities", Run: s.keepTrust},
		lifecycle.Part{Name: "fleet: doubts", Run: s.doubts.run},
		lifecycle.Part{Name: "fleet: losses", Run: func(ctx context.Context) error {
			if err := s.view.waitForSync(ctx); err != nil {
				return err
			}
			close(s.synced)
			s.rearm()
			return s.losses.run(ctx)
		}},
	)
}

// maxMessage bounds a message to an agent. It is larger than the largest object with its envelope.
const maxMessage = 16 << 20

// ready waits until the informers are synced, so that assignments can be computed.
func (s *Server) ready(ctx context.Context) error {
	select {
	case <-s.synced:
		return nil
	case <-s.stopping:
		return status.Errorf(codes.Unavailable, "fleet: replica %s is stopping", s.cfg.Replica)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Connected reports whether the node has its session with this replica.
func (s *Server) Connected(node string) bool { return s.view.session(node) != nil }

// Standing reports whether the node is connected to this replica, with or without a session.
func (s *Server) Standing(node string) bool { return s.standbys.has(node) }
