package session

import (
	"maps"
	"slices"
	"sync"
)

// sessions contains the current session of each node with this replica.
type sessions struct {
	mu     sync.RWMutex
	byNode map[string]*nodeSession
}

func newSessions() *sessions { return &sessions{byNode: make(map[string]*nodeSession)} }

// addSession registers n as the session of its node. It returns the session that n replaces, or
// nil. ok is false if a newer session is registered.
func (l *sessions) addSession(n *nodeSession) (older *nodeSession, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	older = l.byNode[n.node]
	if older != nil && older.epoch > n.epoch {
		return nil, false
	}
	l.byNode[n.node] = n
	return older, true
}

// removeSession removes n and reports whether n was the registered session of its node.
func (l *sessions) removeSession(n *nodeSession) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.byNode[n.node] != n {
		return false
	}
	delete(l.byNode, n.node)
	return true
}

// sessionOf returns the node's session, or nil.
func (l *sessions) sessionOf(node string) *nodeSession {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.byNode[node]
}

// allSessions returns all sessions with this replica.
func (l *sessions) allSessions() []*nodeSession {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return slices.Collect(maps.Values(l.byNode))
}
