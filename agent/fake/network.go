package fake

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"sync"

	"keelson.dev/keelson/agent"
)

// Network simulates a pod network. It assigns each address of one prefix to at most one sandbox. It
// implements agent.Network.
type Network struct {
	Script
	Clock  Clock
	Prefix netip.Prefix // zero: 10.88.0.0/16

	mu   sync.Mutex
	used map[string]netip.Addr // key: sandbox ID
	next netip.Addr
}

var _ agent.Network = (*Network)(nil)

// Add assigns an address to a sandbox, or returns the address that it already has. It implements
// agent.Network.
func (n *Network) Add(ctx context.Context, r agent.NetworkRequest) (agent.NetworkStatus, error) {
	if err := n.enterVerb(ctx, n.Clock, "Add", r.SandboxID); err != nil {
		return agent.NetworkStatus{}, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if a, ok := n.used[r.SandboxID]; ok {
		return agent.NetworkStatus{IPs: []string{a.String()}}, nil
	}
	if !n.Prefix.IsValid() {
		n.Prefix = netip.MustParsePrefix("10.88.0.0/16")
	}
	taken := map[netip.Addr]bool{}
	for _, a := range n.used {
		taken[a] = true
	}
	first := n.Prefix.Masked().Addr().Next().Next()
	a := n.next
	if !a.IsValid() {
		a = first
	}
	for range 1 << 16 {
		if !n.Prefix.Contains(a) {
			a = first
		}
		if !taken[a] {
			if n.used == nil {
				n.used = map[string]netip.Addr{}
			}
			n.used[r.SandboxID], n.next = a, a.Next()
			return agent.NetworkStatus{IPs: []string{a.String()}}, nil
		}
		a = a.Next()
	}
	return agent.NetworkStatus{}, fmt.Errorf("no address left in %s", n.Prefix)
}

// Check returns the failure that the Script specifies for "Check". It implements agent.Network.
func (n *Network) Check(ctx context.Context, r agent.NetworkRequest) error {
	return n.enterVerb(ctx, n.Clock, "Check", r.SandboxID)
}

// Del releases the address of a sandbox. It implements agent.Network.
func (n *Network) Del(ctx context.Context, r agent.NetworkRequest) error {
	if err := n.enterVerb(ctx, n.Clock, "Del", r.SandboxID); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.used, r.SandboxID)
	return nil
}

// GC returns the failure that the Script specifies for "GC". It implements agent.Network.
func (n *Network) GC(ctx context.Context, keep []string) error {
	return n.enterVerb(ctx, n.Clock, "GC", strings.Join(keep, " "))
}

// Ready returns the failure that the Script specifies for "Ready". It implements agent.Network.
func (n *Network) Ready() error { return n.enterVerb(context.Background(), Clock{}, "Ready", "") }

// InUse returns the number of addresses that are assigned to sandboxes.
func (n *Network) InUse() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.used)
}
