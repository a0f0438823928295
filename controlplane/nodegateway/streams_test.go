package nodegateway

import (
	"context"
	"testing"

	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// Requests to a node that does not read its standby stream are bounded; abandoned ones are
// withdrawn.
func TestStandbyThatIsNotRead(t *testing.T) {
	ctx, end := context.WithCancelCause(t.Context())
	b := &standby{node: "w1", end: end, wake: make(chan struct{}, 1)}
	first, second := &fleetv1.StandbyDown{}, &fleetv1.StandbyDown{}
	b.post(first)
	b.post(second)
	b.withdraw(first)
	b.withdraw(first)
	if m := b.take(); m != second || b.take() != nil {
		t.Error("what was taken back is sent, or the other is not")
	}
	for range maxOutbox {
		b.post(&fleetv1.StandbyDown{})
	}
	if ctx.Err() != nil {
		t.Error("it ended too early")
	}
	b.post(&fleetv1.StandbyDown{})
	if context.Cause(ctx) != errSlowAgent || len(b.out) != maxOutbox {
		t.Errorf("%v with %d waiting", context.Cause(ctx), len(b.out))
	}
}

// A node can open no more tunnels than requested, plus a few late ones.
func TestTunnelsThatWereNotAskedFor(t *testing.T) {
	l := newTunnels()
	open := func(want bool) (named func()) {
		t.Helper()
		named, ok := l.opening("w1")
		if ok != want {
			t.Fatalf("a tunnel more is let in: %v", ok)
		}
		return named
	}
	l.add("other", &askedTunnel{node: "w2"})
	named := open(true)
	for range maxUnasked - 1 {
		open(true)
	}
	open(false)
	l.add("id", &askedTunnel{node: "w1"})
	open(true)
	open(false)
	l.claim("id", "w1")
	named()
	open(false)
}
