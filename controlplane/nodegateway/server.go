// Package nodegateway is the control plane's side of the fleet protocol: the gRPC service to which
// agents connect. It runs on every replica, and nothing in its memory must survive a restart. It
// reads from the shared informer caches and writes through the API with the identity of the
// reporting node.
//
//	agent ──Session──▶ replica that holds the node's session: objects down, statuses up
//	agent ──Standby──▶ every replica: applied proxy revision up, tunnel requests down
//	agent ──Tunnel───▶ the replica that requested it: exec, attach, logs, port-forward
//
// This package connects its parts: accept (connections and enrollment), session (the session of a
// node), assign (objects sent down), report (data sent up), and stream (tunnels). A gRPC method of
// this package decodes, calls one function of a part, and encodes.
package nodegateway

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"time"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/nodegateway/accept"
	"keelson.dev/keelson/controlplane/nodegateway/assign"
	"keelson.dev/keelson/controlplane/nodegateway/report"
	"keelson.dev/keelson/controlplane/nodegateway/session"
	"keelson.dev/keelson/controlplane/nodegateway/stream"
	"keelson.dev/keelson/controlplane/nodegateway/wire"
	"keelson.dev/keelson/internal/clusterid"
	"keelson.dev/keelson/internal/connlimit"
	"keelson.dev/keelson/internal/lifecycle"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// Config is the configuration of a Server. Fields are required unless their comment names a
// default.
type Config struct {
	Replica string // name of this replica
	Listen  ListenConfig

	// Client must have no user set. The server acts as the reporting node, and as System for its
	// own writes.
	Client    *client.Client
	Informers *client.Informers // New creates its informers here; the caller runs them
	// PodAddresses determines which pod addresses policies may select. If it is nil, they may
	// select all.
	PodAddresses *podaddress.Index
	System       api.User // writes session records and lost nodes; default: system:apiserver in system:masters

	Cluster  session.Cluster
	Enroll   accept.EnrollConfig
	CA       Authorities // the CAs that nodes must trust
	Replicas ReplicasConfig
	Timing   Timing

	Timeline *api.Timeline // receives the stages that agents measure; may be nil
	Log      *slog.Logger  // nil means no logging
}

// ListenConfig configures the listener for agents.
type ListenConfig struct {
	Listener net.Listener // Run closes it when it ends
	// Connections limits the open connections; default accept.DefaultLimits.
	Connections connlimit.Limits
	// TLS must request a client certificate and verify one that is given (VerifyClientCertIfGiven):
	// Enrollment calls have none, Fleet calls require one. The presented chain must include the CA
	// certificate itself, because a joining agent has only the CA's hash.
	TLS *tls.Config
	// Identity returns the cluster ID and incarnation of this replica, which agents compare with
	// theirs. It returns false while they are not known. If it is nil, identities are not compared.
	Identity func() (clusterid.Identity, bool)
}

// ReplicasConfig describes the replicas of the control plane.
type ReplicasConfig struct {
	// List returns the list of replicas and a channel that is closed when the list changes.
	List func() ([]*fleetv1.Replica, <-chan struct{})
	// IsAlive reports whether a replica is reachable from this replica. It is called only on the
	// leader.
	IsAlive func(replica string) bool
	// CanWrite reports whether this replica can commit writes. While it cannot, it does not
	// acknowledge heartbeats, so that agents move to another replica. If it is nil, the replica
	// always can.
	CanWrite func() bool
}

// Timing contains the intervals of sessions. Heartbeat and Suspect are longer in large clusters.
type Timing struct {
	Heartbeat time.Duration // interval at which agents send heartbeats; default 1 s
	Suspect   time.Duration // time without a message after which a session ends; default 4 s
	Grace     time.Duration // time from the end of the session to Ready=Unknown; default 5 s
	StopGate  time.Duration // maximum delay of a pod's stop (assign.StopGate); default 1 s
}

// Authorities are the CAs that nodes must trust, and by which their certificates are verified.
type Authorities interface {
	accept.Authorities
	session.Authorities
}

func (c *Config) setDefaults() {
	if c.System.Name == "" {
		c.System = api.User{Name: api.UserAPIServer, Groups: []string{api.GroupMasters, api.GroupAuthenticated}}
	}
	if c.Listen.Connections == (connlimit.Limits{}) {
		c.Listen.Connections = accept.DefaultLimits()
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Replicas.CanWrite == nil {
		c.Replicas.CanWrite = func() bool { return true }
	}
	t := &c.Timing
	for _, d := range []struct {
		value    *time.Duration
		standard time.Duration
	}{{&t.Heartbeat, time.Second}, {&t.Suspect, 4 * time.Second}, {&t.Grace, 5 * time.Second}, {&t.StopGate,
		time.Second}} {
		if *d.value == 0 {
			*d.value = d.standard
		}
	}
}

// Server is the gRPC server for agents on one replica. Its methods are safe for concurrent use.
type Server struct {
	fleetv1.UnimplementedEnrollmentServer
	fleetv1.UnimplementedFleetServer

	cfg         Config
	lifetime    *wire.Lifetime
	connections *accept.NodeConnections
	revocations *accept.Revocations
	acceptor    *accept.Acceptor
	enroller    *accept.Enroller
	reviewer    *accept.Reviewer
	sessions    *session.Server
	streams     *stream.Server
	heartbeats  *report.HeartbeatTimes
	usage       *report.UsageReports
}

// New returns a Server and creates its informers in cfg.Informers. It starts nothing until Run.
func New(cfg Config) *Server {
	cfg.setDefaults()
	system := cfg.Client.As(cfg.System)
	s := &Server{
		cfg: cfg, lifetime: wire.NewLifetime(cfg.Replica), connections: accept.NewNodeConnections(cfg.Log),
		heartbeats: report.NewHeartbeatTimes(), usage: report.NewUsageReports(),
	}
	gate := assign.NewStopGate(cfg.Timing.StopGate)
	view := assign.NewView(cfg.Informers, cfg.PodAddresses, gate, cfg.Log)
	s.streams = stream.New(stream.Config{Lifetime: s.lifetime, Observer: standbyObserver{s, gate},
		ListReplicas: cfg.Replicas.List})
	s.revocations = accept.NewRevocations(system, cfg.Informers, s.connections, s.endDeletedNode, cfg.Log)
	s.enroller = accept.NewEnroller(cfg.Enroll, system, s.revocations, cfg.Log)
	s.reviewer = accept.NewReviewer(cfg.Client, s.revocations)
	s.acceptor = accept.NewAcceptor(accept.AcceptorConfig{
		Listener: cfg.Listen.Listener, Limits: cfg.Listen.Connections, TLS: cfg.Listen.TLS,
		Identity: cfg.Listen.Identity,
		CA:       cfg.CA, Lifetime: s.lifetime, Connections: s.connections, Revocations: s.revocations, Log: cfg.Log,
	})
	s.sessions = session.New(session.Config{
		Lifetime: s.lifetime, Client: system, Informers: cfg.Informers, View: view, Gate: gate,
		Reports: &report.Config{
			Lifetime: s.lifetime, Client: cfg.Client, Objects: view, Events: report.NewEventIndex(),
			Timeline: cfg.Timeline, IsRevoked: s.revocations.IsRevokedInStore,
			CSINodes: client.Informer[*storagev1.CSINode](cfg.Informers).GetIndexer(),
			OwnLease: func(ctx context.Context, node *v1.Node) { session.SetLeaseOwner(ctx, system, node, cfg.Log) },
			Log:      cfg.Log,
		},
		Heartbeats: s.heartbeats, Cluster: cfg.Cluster, CA: cfg.CA,
		Timing: session.Timing{Heartbeat: cfg.Timing.Heartbeat, Suspect: cfg.Timing.Suspect,
			Grace: cfg.Timing.Grace},
		IsRevoked: s.revocations.IsRevoked, HasStandby: s.streams.HasStandby,
		IsReplicaAlive: cfg.Replicas.IsAlive, CanWrite: cfg.Replicas.CanWrite, Log: cfg.Log,
	})
	return s
}

// endDeletedNode ends the session of a deleted Node immediately, so that the session does not
// create the Node again.
func (s *Server) endDeletedNode(node string) { s.sessions.EndSession(node, wire.RevokedError(node)) }

// Run serves agents until ctx ends and returns when every session has ended. The informers must be
// running. Sessions start when the informers are synced.
func (s *Server) Run(ctx context.Context) error {
	defer s.lifetime.Wait()
	return lifecycle.Run(ctx,
		lifecycle.Part{Name: "fleet: serve", Run: func(ctx context.Context) error {
			return s.acceptor.ServeAgents(ctx, s)
		}},
		lifecycle.Part{Name: "fleet: deleted nodes", Run: s.revocations.RevokeDeletedNodes},
		lifecycle.Part{Name: "fleet: untrusted connections", Run: func(ctx context.Context) error {
			return s.connections.CloseUntrusted(ctx, s.cfg.CA)
		}},
		lifecycle.Part{Name: "fleet: sessions", Run: s.sessions.Run},
	)
}

// RunLeader marks a node as lost when the replica in its session record is no longer alive. It
// returns when ctx, the leadership, ends. The client c acts as the system user and writes only
// during the leader's term.
func (s *Server) RunLeader(ctx context.Context, c *client.Client) error {
	return s.sessions.RunLeader(ctx, c)
}

// RunSweeper deletes records of tokens, claims and revocations that no longer have an effect, until
// ctx ends. The client c acts as the system user and writes only during the leader's term.
func (s *Server) RunSweeper(ctx context.Context, c *client.Client) error {
	return s.revocations.RunSweeper(ctx, c, s.cfg.Enroll.CertificateLife)
}

// HasSession reports whether the node has its session with this replica.
func (s *Server) HasSession(node string) bool { return s.sessions.HasSession(node) }

// HasStandby reports whether the node is connected to this replica, with or without a session.
func (s *Server) HasStandby(node string) bool { return s.streams.HasStandby(node) }

// Streams returns the server for streams to pods on the nodes that are connected to this replica.
func (s *Server) Streams() *stream.Server { return s.streams }

// RevokeNode revokes all certificates that were issued to a node up to now, for an administrator.
func (s *Server) RevokeNode(ctx context.Context, node string) error {
	return s.revocations.RevokeNode(ctx, node)
}

// NodeCertificates returns the certificates of the nodes that are connected to this replica, one
// for each use.
func (s *Server) NodeCertificates() map[string][]session.NodeCertificate {
	return s.sessions.NodeCertificates(s.connections.NewestCertificates())
}

// NodeAuthorities returns the CAs that each node with a session on this replica has reported.
func (s *Server) NodeAuthorities() map[string]session.NodeAuthorities {
	return s.sessions.NodeAuthorities()
}

// LastHeartbeats returns the time of each node's last heartbeat to this replica. Nodes with a
// session on another replica are not included.
func (s *Server) LastHeartbeats() map[string]time.Time {
	return s.heartbeats.RecentHeartbeats(time.Now())
}

// NodeUsages returns the recent usage of the nodes that have reported it to this replica. Agents of
// earlier releases do not report it.
func (s *Server) NodeUsages() map[string]*report.NodeUsage { return s.usage.FreshReports(time.Now()) }

// standbyObserver implements stream.Observer: it passes reports to the StopGate and the
// UsageReports.
type standbyObserver struct {
	server *Server
	gate   *assign.StopGate
}

func (o standbyObserver) RecordApplied(node string, revision uint64) {
	o.gate.RecordApplied(node, revision)
}

func (o standbyObserver) RecordDisconnect(node string) {
	if !o.server.HasSession(node) {
		o.gate.RecordDisconnect(node)
	}
}

func (o standbyObserver) RecordUsage(node string, usage *fleetv1.NodeUsage) {
	if err := o.server.usage.RecordUsage(node, usage, time.Now()); err != nil {
		o.server.cfg.Log.Debug("usage of a node dropped", "node", node, "err", err)
	}
}
