// Package session runs the sessions of nodes with this replica: it sends each agent the node's
// objects and passes the agent's messages to the node's Reporter. It also determines when a node
// without a session is lost.
//
//	agent ──Session──▶ replica that holds the node's session: objects down, statuses up
//
// One goroutine per session sends changes, another receives the agent's messages and acknowledges
// heartbeats. Nothing in memory must survive a restart: the replica that has a node's session is
// recorded in the node's Lease.
package session

import (
	"context"
	"crypto/x509"
	"fmt"
	"log/slog"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/nodegateway/assign"
	"keelson.dev/keelson/controlplane/nodegateway/report"
	"keelson.dev/keelson/controlplane/nodegateway/wire"
	"keelson.dev/keelson/internal/lifecycle"
)

// Cluster is the cluster configuration that is sent to every node. ClusterCIDR and ServiceCIDR may
// each contain one prefix per IP family, separated by a comma.
type Cluster struct {
	Name, ClusterCIDR, ServiceCIDR, Domain string
}

// Timing contains the intervals of sessions. All are positive.
type Timing struct {
	Heartbeat time.Duration // interval of heartbeats; longer in large clusters, like Suspect (heartbeatPace)
	Suspect   time.Duration // time without a message after which a session ends
	Grace     time.Duration // time from the end of the session to Ready=Unknown
}

// Config is the configuration of a Server. All fields are required.
type Config struct {
	Lifetime   *wire.Lifetime
	Client     *client.Client    // acts as the system user, for session records and lost nodes
	Informers  *client.Informers // New creates its informers here
	View       *assign.View
	Gate       *assign.StopGate
	Reports    *report.Config
	Heartbeats *report.HeartbeatTimes
	Cluster    Cluster
	Timing     Timing
	CA         Authorities
	// IsRevoked reports whether a node's certificate is revoked, according to the informer cache.
	IsRevoked func(node string, cert *x509.Certificate) bool
	// HasStandby reports whether the node has a standby connection to this replica.
	HasStandby func(node string) bool
	// IsReplicaAlive reports whether a replica is reachable from this replica. It is called only on
	// the leader.
	IsReplicaAlive func(replica string) bool
	// CanWrite reports whether this replica can commit writes. While it cannot, it does not
	// acknowledge heartbeats, so that agents move to another replica.
	CanWrite func() bool
	Log      *slog.Logger
}

// Server runs the sessions of one replica. Its methods are safe for concurrent use.
type Server struct {
	cfg        Config
	sessions   *sessions
	losses     *nodeTimers // timers after which a node without a session is marked as lost
	suspicions *nodeTimers // timers after which a node without a session is suspected (suspicion.go)
	starting   startSlots
	leases     cache.Indexer
	services   cache.Indexer
	handlers   []cache.ResourceEventHandlerRegistration
	synced     chan struct{} // closed when the informer caches contain the initial lists
}

// New returns a Server and creates its informers. It starts nothing until Run.
func New(cfg Config) *Server {
	s := &Server{
		cfg: cfg, sessions: newSessions(), starting: make(startSlots, maxStartingSessions), synced: make(chan struct{}),
		services: client.Informer[*v1.Service](cfg.Informers).GetIndexer(),
		leases:   client.Informer[*coordinationv1.Lease](cfg.Informers).GetIndexer(),
	}
	s.losses = newNodeTimers(cfg.Log, func(ctx context.Context, node string, epoch uint64) error {
		if s.sessions.sessionOf(node) != nil {
			return nil
		}
		cfg.Log.Info("node lost: its session did not come back", "node", node, "epoch", epoch)
		return markLost(ctx, cfg.Client, node, epoch, cfg.Heartbeats.LastHeartbeat(node))
	})
	s.suspicions = newNodeTimers(cfg.Log, s.suspectNode)
	s.addHandler(client.Informer[*coordinationv1.Lease](cfg.Informers), "Leases", s.leaseHandler())
	s.addHandler(client.Informer[*storagev1.CSINode](cfg.Informers), "CSINodes", s.csiNodeHandler())
	return s
}

// addHandler registers a handler with an informer that has not started.
func (s *Server) addHandler(informer cache.SharedIndexInformer, kind string, handler cache.ResourceEventHandler) {
	registration, err := informer.AddEventHandler(handler)
	if err != nil {
		panic(fmt.Sprintf("fleet: watch %s: %v", kind, err)) // never happens, because the informer has not started
	}
	s.handlers = append(s.handlers, registration)
}

// csiNodeHandler returns a handler that calls SyncNode when the CSINode of a node is changed or
// deleted.
func (s *Server) csiNodeHandler() cache.ResourceEventHandlerFuncs {
	sync := func(o any) {
		if t, ok := o.(cache.DeletedFinalStateUnknown); ok {
			o = t.Obj
		}
		if c, ok := o.(*storagev1.CSINode); ok {
			if n := s.sessions.sessionOf(c.Name); n != nil {
				n.reporter.SyncNode()
			}
		}
	}
	return cache.ResourceEventHandlerFuncs{UpdateFunc: func(_, o any) { sync(o) }, DeleteFunc: sync}
}

// Run runs the timers of nodes without a session and sends changes of the trusted CAs to agents,
// until ctx ends. Sessions start when the informers are synced.
func (s *Server) Run(ctx context.Context) error {
	return lifecycle.Run(ctx,
		lifecycle.Part{Name: "fleet: authorities", Run: s.distributeTrust},
		lifecycle.Part{Name: "fleet: doubts", Run: s.suspicions.runTimers},
		lifecycle.Part{Name: "fleet: losses", Run: func(ctx context.Context) error {
			if err := s.waitForSync(ctx); err != nil {
				return err
			}
			close(s.synced)
			s.restartTimers()
			return s.losses.runTimers(ctx)
		}},
	)
}

// waitForSync blocks until every handler has received the initial lists.
func (s *Server) waitForSync(ctx context.Context) error {
	if err := s.cfg.View.WaitForSync(ctx); err != nil {
		return err
	}
	for _, h := range s.handlers {
		select {
		case <-h.HasSyncedChecker().Done():
		case <-ctx.Done():
			return fmt.Errorf("fleet: wait for informers: %w", ctx.Err())
		}
	}
	return nil
}

// awaitSync waits until the informers are synced, so that assignments can be computed.
func (s *Server) awaitSync(ctx context.Context) error {
	select {
	case <-s.synced:
		return nil
	case <-s.cfg.Lifetime.Stopping():
		return s.cfg.Lifetime.StoppingError()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// HasSession reports whether the node has its session with this replica.
func (s *Server) HasSession(node string) bool { return s.sessions.sessionOf(node) != nil }

// EndSession ends the node's session with this replica, if it has one, with the error err.
func (s *Server) EndSession(node string, err error) {
	if n := s.sessions.sessionOf(node); n != nil {
		n.End(err)
	}
}
