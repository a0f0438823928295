package stream

import (
	"context"
	"testing"

	"keelson.dev/keelson/controlplane/nodegateway/wire"
	"keelson.dev/keelson/internal/wakeup"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// Requests to a node that does not read its standby stream are bounded; abandoned ones are
// withdrawn.
func TestStandbyQueueIsBounded(t *testing.T) {
	ctx, end := context.WithCancelCause(t.Context())
	b := &standbyConn{node: "w1", cancel: end, wake: wakeup.New()}
	first, second := &fleetv1.StandbyDown{}, &fleetv1.StandbyDown{}
	b.queueMessage(first)
	b.queueMessage(second)
	b.withdrawMessage(first)
	b.withdrawMessage(first)
	if m := b.takeMessage(); m != second || b.takeMessage() != nil {
		t.Error("what was taken back is sent, or the other is not")
	}
	for range wire.MaxOutbox {
		b.queueMessage(&fleetv1.StandbyDown{})
	}
	if ctx.Err() != nil {
		t.Error("it ended too early")
	}
	b.queueMessage(&fleetv1.StandbyDown{})
	if context.Cause(ctx) != wire.ErrSlowAgent || len(b.out) != wire.MaxOutbox {
		t.Errorf("%v with %d waiting", context.Cause(ctx), len(b.out))
	}
}

// A node can open no more tunnels than requested, plus a few late ones.
func TestUnrequestedTunnelsAreBounded(t *testing.T) {
	l := newTunnelRequests()
	open := func(want bool) (named func()) {
		t.Helper()
		named, ok := l.countOpening("w1")
		if ok != want {
			t.Fatalf("a tunnel more is let in: %v", ok)
		}
		return named
	}
	l.addRequest("other", &tunnelRequest{node: "w2"})
	named := open(true)
	for range maxUnrequestedTunnels - 1 {
		open(true)
	}
	open(false)
	l.addRequest("id", &tunnelRequest{node: "w1"})
	open(true)
	open(false)
	l.claimRequest("id", "w1")
	named()
	open(false)
}
