package nodegateway

import (
	"maps"
	"sync"
	"time"
)

// heard remembers when each node's last heartbeat came to this replica, also after its session has ended. Heartbeats
// are in no store: who reads a Node or its Lease is told from here.
type heard struct {
	mu    sync.Mutex
	nodes map[string]time.Time
}

// remembered is how long a node that has fallen silent is remembered.
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

// Heard is when the last heartbeat of each node came to this replica. Nodes whose sessions are with other replicas are
// not in it.
func (s *Server) Heard() map[string]time.Time { return s.heard.all(time.Now()) }
