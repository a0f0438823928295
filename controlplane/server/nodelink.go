package server

import (
	"context"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/membership"
	"keelson.dev/keelson/controlplane/nodegateway"
	"keelson.dev/keelson/controlplane/nodegateway/report"
	"keelson.dev/keelson/controlplane/nodegateway/session"
)

// nodeConnections opens streams and connections to nodes through the agents on them.
type nodeConnections interface {
	api.NodeStreams
	api.NodeDialer
	api.NodeDrivers
}

// nodeReports returns the last reports of nodes. *nodegateway.Server implements it.
type nodeReports interface {
	// LastHeartbeats returns the time of the last heartbeat of each node with a session on this
	// replica.
	LastHeartbeats() map[string]time.Time
	// NodeUsages returns the resource usage of the nodes with a session on this replica.
	NodeUsages() map[string]*report.NodeUsage
	// NodeAuthorities returns the CAs that each node with a session on this replica trusts.
	NodeAuthorities() map[string]session.NodeAuthorities
}

// nodeLink gives access to the nodes through the node gateway. It breaks an initialization cycle:
// the node gateway is a client of the API server, and the API server, the controllers and key
// rotation use the gateway. These are created with an empty nodeLink, and wireReplica sets the
// gateway before any of them runs. Until setGateway is called, no other method may be called.
type nodeLink struct {
	nodeConnections
	nodeReports
	gateway *nodegateway.Server // the rest of package server calls its other methods directly
}

// setGateway sets the node gateway to which l forwards all calls.
func (l *nodeLink) setGateway(gateway *nodegateway.Server) {
	l.nodeConnections, l.nodeReports, l.gateway = gateway.Streams(), gateway, gateway
}

// requireNodeFeatures returns a function that returns an error, which names feature, while the
// cluster's feature level is below datadir.LevelNodeFeatures. Until then, the scheduler may be one
// of an earlier release, which gives pods to nodes without the features that the pods require.
func requireNodeFeatures(level func() *membership.Level) func(ctx context.Context, feature string) error {
	return func(ctx context.Context, feature string) error {
		if level().CurrentLevel() >= datadir.LevelNodeFeatures {
			return nil
		}
		return level().RequireLevel(ctx, feature, datadir.LevelNodeFeatures)
	}
}
