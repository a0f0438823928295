// Package stream requests tunnels from agents and provides streams to pods over them: exec, attach,
// logs and port-forward. It also provides connections, and calls of CSI drivers.
//
//	agent ──Standby──▶ every replica: applied proxy revision and usage up, tunnel requests down
//	agent ──Tunnel───▶ the replica that requested it
package stream

import (
	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/nodegateway/wire"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// Observer receives what nodes report on their standby connections. Its methods must not block.
type Observer interface {
	// RecordApplied is called when a node's proxy has applied a revision, and with revision 0 when
	// the node connects.
	RecordApplied(node string, revision uint64)
	// RecordDisconnect is called when a node no longer has a standby connection.
	RecordDisconnect(node string)
	// RecordUsage is called with a node's usage report, which is not validated.
	RecordUsage(node string, usage *fleetv1.NodeUsage)
}

// Config is the configuration of a Server. All fields are required.
type Config struct {
	Lifetime *wire.Lifetime
	Observer Observer
	// ListReplicas returns the list of replicas and a channel that is closed when the list changes.
	ListReplicas func() ([]*fleetv1.Replica, <-chan struct{})
}

// Server contains the standby connections of the agents to this replica and requests tunnels over
// them. Its methods are safe for concurrent use. Create it with New.
type Server struct {
	cfg      Config
	standbys *standbyConns
	requests *tunnelRequests
}

var (
	_ api.NodeStreams = (*Server)(nil)
	_ api.NodeDialer  = (*Server)(nil)
	_ api.NodeDrivers = (*Server)(nil)
)

// New returns a server without connections.
func New(cfg Config) *Server {
	return &Server{cfg: cfg, standbys: newStandbyConns(), requests: newTunnelRequests()}
}

// HasStandby reports whether the node is connected to this replica, with or without a session.
func (s *Server) HasStandby(node string) bool { return s.standbys.hasNode(node) }
