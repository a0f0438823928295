package server_test

import (
	"testing"
)

// A replica that has joined runs with its data directory alone, before and after it becomes a
// member.
func TestRunAfterJoin(t *testing.T) {
	p := newPlane(t, 1, nil)
	c := p.NewConfig(2)
	p.Join(c)
	for range 2 {
		bare := c
		bare.Advertise = ""
		p.StartReplica(bare)
		p.Members[c.Name].Config = c // the clients of the test need the address
		p.AwaitReady(c.Name)
		p.StopReplica(c.Name)
	}
}
