package network

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"sigs.k8s.io/knftables"
)

func portsOf(count int) map[string]podPort {
	out := map[string]podPort{}
	for i := range count {
		out[fmt.Sprint("sandbox", i)] = podPort{Name: fmt.Sprintf("veth%08x", i),
			MAC: fmt.Sprintf("02:00:00:00:00:%02x", i),
			Addresses: []netip.Addr{netip.AddrFrom4([4]byte{10, 244, 1, byte(i + 2)}),
				netip.MustParseAddr(fmt.Sprintf("fd00::%x", i+2))}}
	}
	return out
}

// The link-local address of a pod is derived from its hardware address as the kernel does it.
func TestLinkLocalOfAPod(t *testing.T) {
	for mac, want := range map[string]string{"02:00:00:00:00:01": "fe80::ff:fe00:1",
		"aa:bb:cc:dd:ee:ff": "fe80::a8bb:ccff:fedd:eeff"} {
		if got, ok := linkLocal(mac); !ok || got.String() != want {
			t.Errorf("link-local address of %s is %s, want %s", mac, got, want)
		}
	}
	for _, mac := range []string{"", "1", "00:00:00:00:00:00:00:01"} {
		if got, ok := linkLocal(mac); ok {
			t.Errorf("%q gives the link-local address %s", mac, got)
		}
	}
}

// F107: each pod may send with its hardware address, its addresses of both families and its
// link-local address, and no others. The table contains nothing about exempt pods.
func TestElementsOfSenders(t *testing.T) {
	ports := portsOf(1)
	exempt := portsOf(2)["sandbox1"]
	exempt.Exempt = true
	ports["router"] = exempt
	got := senderElements(ports)
	for set, want := range map[string]string{
		setPorts:      "veth00000000",
		setMACs:       "veth00000000 . 02:00:00:00:00:00",
		setAddresses4: "veth00000000 . 10.244.1.2",
		setAddresses6: "veth00000000 . fd00::2|veth00000000 . fe80::ff:fe00:0",
		setTargets: "veth00000000 . 0xfd000000000000000000000000000002|veth00000000 . " +
			"0xfe80000000000000000000fffe000000",
	} {
		wanted := map[string]bool{}
		for e := range strings.SplitSeq(want, "|") {
			wanted[e] = true
		}
		if fmt.Sprint(got[set]) != fmt.Sprint(wanted) {
			t.Errorf("set %s has %v, want %v", set, got[set], wanted)
		}
	}
}

// F107: a change adds and removes the elements of added and removed pods only. Without a change,
// nothing is written.
func TestSendersChangeByPod(t *testing.T) {
	fake := knftables.NewFake(knftables.BridgeFamily, SenderTable)
	build := fake.NewTransaction()
	buildSenders(build, portsOf(3))
	if err := fake.Run(context.Background(), build); err != nil {
		t.Fatal(err)
	}
	same := fake.NewTransaction()
	changeSenders(same, senderElements(portsOf(3)), senderElements(portsOf(3)))
	if n := same.NumOperations(); n != 0 {
		t.Errorf("%d operations without a change:\n%s", n, same)
	}
	more := fake.NewTransaction()
	changeSenders(more, senderElements(portsOf(3)), senderElements(portsOf(4)))
	if n := more.NumOperations(); n != 7 {
		t.Errorf("%d operations for one more pod, want 7:\n%s", n, more)
	}
	if err := fake.Run(context.Background(), more); err != nil {
		t.Fatal(err)
	}
	again := fake.NewTransaction()
	buildSenders(again, portsOf(4))
	before := fake.Dump()
	if err := fake.Run(context.Background(), again); err != nil {
		t.Fatal(err)
	}
	if after := fake.Dump(); after != before {
		t.Errorf("building the table differs from changing it:\n%s\nchanged:\n%s", after, before)
	}
}

// F107: callers that arrive while a transaction runs share the next one.
func TestSendersShareATransaction(t *testing.T) {
	s := newSenderCheck(func() map[string]podPort { return portsOf(2) }, slog.New(slog.DiscardHandler))
	counted := &countedRuns{Interface: knftables.NewFake(knftables.BridgeFamily, SenderTable)}
	s.nft = counted
	for range 3 {
		if err := s.syncTable(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if counted.runs != 1 {
		t.Errorf("%d transactions for one state", counted.runs)
	}
	s.removeSandbox("sandbox0")
	s.removeSandbox("sandbox1")
	s.removeSandbox("unknown")
	if err := s.syncTable(t.Context()); err != nil {
		t.Fatal(err)
	}
	if counted.runs != 2 || len(s.applied[setPorts]) != 0 {
		t.Errorf("%d transactions, and the table has %v", counted.runs, s.applied[setPorts])
	}
}

type countedRuns struct {
	knftables.Interface
	runs int
}

func (c *countedRuns) Run(ctx context.Context, tx *knftables.Transaction) error {
	c.runs++
	return c.Interface.Run(ctx, tx)
}
