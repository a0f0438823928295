package nodegateway

import (
	"maps"
	"sync"
	"time"
)

// heard records the time of each node's last heartbeat to this replica, also after the session's
// end. Heartbeats are not stored: reads of a Node or its Lease get the time from here.
type heard struct {
	mu    sync.Mutex
	nodes map[string]time.Time
}

// remembered is the time after the last heartbeat for which a node is kept.
const remembered = time.Hour

func newHeard() *heard { return &heard{nodes: make(map[string]time.Time)} }

func (h *heard) note(node string, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.nodes[node] = now
}

// last returns the time of the node's last heartbeat to this replica, or the zero time.
func (h *heard) last(node string) time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.nodes[node]
}

func (h *heard) all(now time.Time) map[string]time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	maps.DeleteFunc(h.nodes, func(_ string, t time.Time) bool { return now.Sub(t) > remembered })
	return maps.Clone(h.nodes)
}

// Heard returns the time of each node's last heartbeat to this replica. Nodes with a session on
// another replica are not included.
func (s *Server) Heard() map[string]time.Time { return s.heard.all(time.Now()) }
