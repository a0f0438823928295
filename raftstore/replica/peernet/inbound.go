package peernet

import (
	"sync"
)

// inboundConns counts the open raft connections from other replicas to this one, by the name in the
// other replica's certificate. It is safe for concurrent use.
type inboundConns struct {
	mu     sync.Mutex
	byName map[string]int
}

// addConn counts a connection from the replica with the given name. The returned function removes
// it from the count. It may be called more than once.
func (c *inboundConns) addConn(name string) (left func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.byName == nil {
		c.byName = make(map[string]int)
	}
	c.byName[name]++
	return sync.OnceFunc(func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.byName[name]--; c.byName[name] == 0 {
			delete(c.byName, name)
		}
	})
}

func (c *inboundConns) HasNone(name string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.byName[name] == 0
}
