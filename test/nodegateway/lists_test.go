package nodegateway_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"

	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// setList makes one replica report these replicas as the complete list.
func (b *testEnv) setList(name string, all ...string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.listed[name] = all
	b.signalChange(name)
}

// awaitList waits until the agent has received all messages of a replica, which it handles in
// order.
func (b *testEnv) awaitList(node, replica string) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	conn, err := b.replicas[replica].fleet.Streams().DialNode(ctx, node, "uid", "10.0.0.1", 80)
	if err != nil {
		b.t.Fatalf("through %s: %v", replica, err)
	}
	conn.Close()
}

func (b *testEnv) awaitStandby(node, replica string, want bool) {
	b.t.Helper()
	b.awaitCondition(replica+" and "+node, func() error {
		if b.replicas[replica].fleet.HasStandby(node) != want {
			return errors.New("connected: want " + map[bool]string{true: "yes", false: "no"}[want])
		}
		return nil
	})
}

// P17: a replica that lags behind the others, or is cut off from them, does not remove from a
// node's list the replicas that it does not list, whenever it reports. A replica that no other
// replica lists any more is dropped.
func TestReplicasThatLagBehind(t *testing.T) {
	b := newTestEnv(t, "cp1", "cp2", "cp3")
	n := b.startAgent("w1", fakeContainers{})
	b.awaitReady("w1", v1.ConditionTrue)
	all := []string{"cp1", "cp2", "cp3"}
	for _, r := range all {
		b.awaitStandby("w1", r, true)
		b.awaitList("w1", r)
	}
	want := b.replicaAddresses()
	known := func() (list []string) {
		data, err := os.ReadFile(filepath.Join(n.state, "replicas.json"))
		if err == nil {
			err = json.Unmarshal(data, &list)
		}
		if err != nil {
			t.Fatal(err)
		}
		return list
	}
	for _, lag := range []struct {
		who  string
		says []string
	}{{"cp2", []string{"cp1", "cp2"}}, {"cp3", []string{"cp1", "cp2"}}, {"cp3", []string{"cp1"}}, {"cp3", nil}} {
		b.setList(lag.who, lag.says...)
		b.awaitList("w1", lag.who)
		if got := known(); !slices.Equal(got, want) {
			t.Errorf("after %s named %v the node knows %v of %v", lag.who, lag.says, got, want)
		}
	}
	for _, r := range all {
		b.awaitList("w1", r)
	}
	b.setList("cp1", "cp1", "cp2")
	b.awaitStandby("w1", "cp3", false)
	if got := known(); len(got) != 2 || slices.Contains(got, b.replicas["cp3"].address) {
		t.Errorf("the node's list is %v, with the removed %s", got, b.replicas["cp3"].address)
	}
	b.setList("cp2", all...)
	b.awaitStandby("w1", "cp3", true)
}

// A replica that is not in its own list has no influence on the list: an agent of the previous
// release uses the last list received.
func TestWhoIsNoMemberNamesNobody(t *testing.T) {
	b := newTestEnv(t, "cp1", "cp2")
	s, err := b.rawClient("w1", b.replicas["cp2"].address).Standby(b.ctx)
	if err == nil {
		err = s.Send(&fleetv1.StandbyUp{Kind: &fleetv1.StandbyUp_Hello{Hello: &fleetv1.StandbyHello{NodeName: "w1"}}})
	}
	if err != nil {
		t.Fatal(err)
	}
	names := func() int {
		m, err := s.Recv()
		if err != nil || m.GetReplicas() == nil {
			t.Fatalf("%v, %v", m, err)
		}
		return len(m.GetReplicas().Replicas)
	}
	if got := names(); got != 2 {
		t.Errorf("at first it names %d", got)
	}
	b.setList("cp2", "cp1")
	if got := names(); got != 0 {
		t.Errorf("taken out it names %d", got)
	}
	b.setList("cp2", "cp1", "cp2")
	if got := names(); got != 2 {
		t.Errorf("as a member again it names %d", got)
	}
}
