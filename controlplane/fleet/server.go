// Package fleet is the control plane's side of the fleet protocol: the gRPC
// service that agents dial. It runs on every replica and holds no truth; all
// that it knows it reads from the shared informers, and all that it changes it
// writes through the API as the node that spoke.
//
//	agent ──Session──▶ replica that owns the node: assignment down, statuses up
//	agent ──Standby──▶ every replica: applied proxy revision up, tunnels asked down
//	agent ──Tunnel───▶ the replica that asked: exec, attach, logs, port-forward
//
// One goroutine per session sends; it drains a set of dirty keys and looks at the
// informers' present state, so that a slow agent costs one set and blocks nobody.
package fleet

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// Config is everything a Server needs. Fields are required unless they say otherwise.
type Config struct {
	Replica  string       // the name of this replica
	Listener net.Listener // closed when Run ends
	// TLS asks for a client certificate and verifies it when given
	// (VerifyClientCertIfGiven): Enrollment has none, Fleet requires one. The
	// certificate chain presented must include the CA itself, because a joining
	// agent knows the CA by hash only.
	TLS *tls.Config

	// Client has no identity yet: the fleet acts as the node that spoke, and as System for its own duties.
	Client    *client.Client
	Informers *client.Informers // New registers its informers; the server runs them
	System    api.User          // writes session records and lost nodes; default: system:apiserver in system:masters

	Cluster Cluster

	// CheckToken judges a join token for a use ("node" or "controlplane") against the Secret
	// kube-system/bootstrap-token-ID that it names; nil error means valid.
	CheckToken func(token, use string, secret *v1.Secret, now time.Time) error
	// SignNode checks the CSR and signs a certificate for CN system:node:NAME, O system:nodes.
	SignNode func(node string, csrDER []byte) (certPEM []byte, err error)
	// CA returns the cluster CA in PEM.
	CA func() []byte
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

	Timeline *api.Timeline // may be nil
	Log      *slog.Logger  // may be nil

	Heartbeat time.Duration // what agents are told; default 1 s
	Suspect   time.Duration // silence after which a session is given up; default 4 s
	Grace     time.Duration // from loss of the session to Ready=Unknown; default 5 s
	StopGate  time.Duration // most that a terminating pod waits for proxies; default 1 s
}

// Cluster is what Welcome tells every node.
type Cluster struct {
	Name, ClusterCIDR, ServiceCIDR, Domain string
}

func (c *Config) defaults() {
	if c.System.Name == "" {
		c.System = api.User{Name: api.UserAPIServer, Groups: []string{api.GroupMasters, api.GroupAuthenticated}}
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
	cfg Config
}

var _ api.NodeStreams = (*Server)(nil)

// New prepares the server and registers its informers with cfg.Informers. Nothing runs until Run.
func New(cfg Config) *Server {
	cfg.defaults()
	return &Server{cfg: cfg}
}

// Run serves until ctx ends. The informers must be running; sessions wait until they are synced.
func (s *Server) Run(ctx context.Context) error {
	<-ctx.Done()
	return fmt.Errorf("fleet: %w", ctx.Err())
}

// RunLeader watches over the nodes whose session record names a replica that is gone, until ctx
// (the leadership) ends. c writes as the system and is fenced with the leadership's term.
func (s *Server) RunLeader(ctx context.Context, c *client.Client) error {
	<-ctx.Done()
	return ctx.Err()
}
