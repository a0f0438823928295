package report

import (
	"maps"
	"sync"
	"time"
)

// HeartbeatTimes records the time of each node's last heartbeat to this replica, also after the
// session has ended. Heartbeats are not stored: when a Node or its Lease is read, the time is taken
// from here. Its methods are safe for concurrent use.
type HeartbeatTimes struct {
	mu    sync.Mutex
	nodes map[string]time.Time
}

// heartbeatMemory is how long the last heartbeat of a node is remembered.
const heartbeatMemory = time.Hour

// NewHeartbeatTimes returns an empty record of heartbeats.
func NewHeartbeatTimes() *HeartbeatTimes { return &HeartbeatTimes{nodes: make(map[string]time.Time)} }

// RecordHeartbeat records a heartbeat of the node.
func (h *HeartbeatTimes) RecordHeartbeat(node string, received time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.nodes[node] = received
}

// LastHeartbeat returns the time of the node's last heartbeat to this replica, or the zero time.
func (h *HeartbeatTimes) LastHeartbeat(node string) time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.nodes[node]
}

// RecentHeartbeats returns the time of each node's last heartbeat to this replica within the last
// hour. It deletes older records.
func (h *HeartbeatTimes) RecentHeartbeats(now time.Time) map[string]time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	maps.DeleteFunc(h.nodes, func(_ string, t time.Time) bool { return now.Sub(t) > heartbeatMemory })
	return maps.Clone(h.nodes)
}
