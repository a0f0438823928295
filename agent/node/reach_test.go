package node

import (
	"context"
	"testing"
)

// A node reports the route of an address and the addresses of a name, or why the name has none.
func TestReach(t *testing.T) {
	if got := reach(t.Context(), "127.0.0.1"); got.NoRoute != "" || got.Unresolved != "" {
		t.Errorf("loopback: %+v", got)
	}
	if got := reach(t.Context(), "localhost"); got.Unresolved != "" || got.NoRoute != "" || len(got.Addresses) == 0 {
		t.Errorf("localhost: %+v", got)
	}
	gone, cancel := context.WithCancel(t.Context()) // no DNS server is asked
	cancel()
	if got := reach(gone, "db.example.com"); got.Unresolved == "" || len(got.Addresses) > 0 {
		t.Errorf("a name without an answer: %+v", got)
	}
}
