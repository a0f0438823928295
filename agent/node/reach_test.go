package node

import (
	"context"
	"testing"
)

// A node returns the route to an address, and the addresses of a name or the reason why it has
// none.
func TestReach(t *testing.T) {
	if got := resolveAndRoute(t.Context(), "127.0.0.1"); got.NoRoute != "" || got.Unresolved != "" {
		t.Errorf("loopback: %+v", got)
	}
	if got := resolveAndRoute(t.Context(), "localhost"); got.Unresolved != "" || got.NoRoute != "" ||
		len(got.Addresses) == 0 {
		t.Errorf("localhost: %+v", got)
	}
	gone, cancel := context.WithCancel(t.Context()) // no DNS server is contacted
	cancel()
	if got := resolveAndRoute(gone, "db.example.com"); got.Unresolved == "" || len(got.Addresses) > 0 {
		t.Errorf("a name without an answer: %+v", got)
	}
}
