// Package nodegateway is the control plane's side of the fleet protocol: the gRPC
// service that agents dial. It runs on every replica and holds no truth; all
// that it knows it reads from the shared informers, and all that it changes it
// writes through the API as the node that spoke.
//
//	agent ──Session──▶ replica that owns the node: assignment down, statuses up
//	agent ──Standby──▶ every replica: applied proxy revision up, tunnels asked down
//	agent ──Tunnel───▶ the replica that asked: exec, attach, logs, port-forward
//
// One goroutine per session sends what changes; it drains a set of dirty keys and looks at the
// informers' present state, so that a slow agent costs one set and blocks nobody. The one that reads
// answers heartbeats.
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

// Config is everything a Server needs. Fields are required unless they say otherwise.
type Config struct {
	Replica  string       // the name of this replica
	Listener net.Listener // closed when Run ends
	// Connections bounds how many there are; default Connections().
	Connections connlimit.Limits
	// TLS asks for a client certificate and verifies it when given
	// (VerifyClientCertIfGiven): Enrollment has none, Fleet requires one. The
	// certificate chain presented must include the CA itself, because a joining
	// agent knows the CA by hash only.
	TLS *tls.Config

	// Client has no identity yet: the fleet acts as the node that spoke, and as System for its own duties.
	Client    *client.Client
	Informers *client.Informers // New registers its informers; the server runs them
	// PodAddresses judges the addresses of pods as peers of policies; nil: all of them count.
	PodAddresses *podaddress.Index
	System       api.User // writes session records and lost nodes; default: system:apiserver in system:masters

	Cluster Cluster

	// TokenKey is the key by which join tokens are known as this cluster's.
	TokenKey pki.TokenKey
	// TokensWait says that tokens which were made with the cluster are not in the store yet: who comes with one is told to
	// come again. nil: never.
	TokensWait func() bool
	// SignNode checks the CSR and signs a certificate for CN system:node:NAME, O system:nodes, issued now or at a later
	// time, where the certificates that were issued before are revoked.
	SignNode func(node string, csrDER []byte, atLeast time.Time) (certPEM []byte, err error)
	// SignServing signs a certificate for the HTTPS server of a node that was seen at an address. nil refuses it.
	SignServing func(node string, csrDER []byte, seen netip.Addr) (certPEM []byte, err error)
	// CertificateLife is for how long SignNode signs.
	CertificateLife time.Duration
	// CA is whom nodes are to believe.
	CA Authorities
	// EnrollReplica hands out the key material and adds the newcomer to the raft group; the token has been checked.
	// nil refuses replicas.
	EnrollReplica func(ctx context.Context, r *fleetv1.EnrollReplicaRequest) (*fleetv1.EnrollReplicaResponse, error)

	// Replicas returns the list of replicas and a channel that is closed when it has changed.
	Replicas func() ([]*fleetv1.Replica, <-chan struct{})
	// Alive says whether a replica is reachable from here (RunLeader asks on the leader only).
	Alive func(replica string) bool
	// Connected says whether this replica can commit at present. While it cannot, heartbeats go
	// unanswered, so that agents move to a replica that can. nil: always.
	Connected func() bool

	// Identity returns the identity of this replica's cluster, which agents compare; false while it is not known. nil: never.
	Identity func() (clusterid.Identity, bool)

	// Audit begins the record of a request to join or to renew, and returns what ends it. An error means that it has to be
	// recorded and cannot be. nil records nothing.
	Audit func(Asked) (func(Answered), error)

	Timeline *api.Timeline // may be nil
	Log      *slog.Logger  // may be nil

	Heartbeat time.Duration // what agents are told; default 1 s. Both are up to twice as long in large clusters (paceOf)
	Suspect   time.Duration // silence after which a session is given up; default 4 s
	Grace     time.Duration // from loss of the session to Ready=Unknown; default 5 s
	StopGate  time.Duration // most that a terminating pod waits for proxies; default 1 s
}

// Cluster is what Welcome tells every node. ClusterCIDR and ServiceCIDR may be one prefix of each family with a comma between.
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

// Server serves agents on one replica.
type Server struct {
	fleetv1.UnimplementedEnrollmentServer
	fleetv1.UnimplementedFleetServer

	cfg      Config
	view     *view
	gate     *gate
	losses   *losses
	doubts   *losses // the same, of nodes that are suspected
	standbys *standbys
	refusals *refusals
	visitors *visitors
	reviews  places[string]     // of nodes
	underWay places[nodeMethod] // of streams
	joins    turns
	spending chan struct{} // holds one who takes down the use of a join token

	deleted   sync.Mutex
	deletions []pki.Revocation // of deleted Nodes, not recorded yet; guarded by deleted
	deletion  chan struct{}    // buffered: deletions has grown
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

// New prepares the server and registers its informers with cfg.Informers. Nothing runs until Run.
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
		panic(fmt.Sprintf("fleet: watch Secrets: %v", err)) // as above
	}
	if _, err := client.Informer[*v1.Node](cfg.Informers).AddEventHandler(s.nodeHandler()); err != nil {
		panic(fmt.Sprintf("fleet: watch Nodes: %v", err)) // as above
	}
	csiNodes := client.Informer[*storagev1.CSINode](cfg.Informers)
	s.csiNodes = csiNodes.GetIndexer()
	if reg, err = csiNodes.AddEventHandler(s.csiNodeHandler()); err != nil {
		panic(fmt.Sprintf("fleet: watch CSINodes: %v", err)) // as above
	}
	s.view.handlers = append(s.view.handlers, reg)
	return s
}

// Run serves until ctx ends. The informers must be running; sessions wait until they are synced.
// It ends when every session has.
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

// maxMessage bounds what is sent to an agent: it is above the largest object with its envelope.
const maxMessage = 16 << 20

// ready waits until assignments can be computed.
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

// Connected says whether the node has its session with this replica.
func (s *Server) Connected(node string) bool { return s.view.session(node) != nil }

// Standing says whether the node is connected to this replica, with or without its session.
func (s *Server) Standing(node string) bool { return s.standbys.has(node) }
