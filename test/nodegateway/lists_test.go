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

// tell has a replica say that these are all replicas, whatever the others say.
func (b *bed) tell(name string, all ...string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.says[name] = all
	b.announce(name)
}

// heard waits until the agent has heard all that a replica has said: it takes one thing after the other.
func (b *bed) heard(node, replica string) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	conn, err := b.replicas[replica].fleet.DialNode(ctx, node, "uid", "10.0.0.1", 80)
	if err != nil {
		b.t.Fatalf("through %s: %v", replica, err)
	}
	conn.Close()
}

func (b *bed) standing(node, replica string, want bool) {
	b.t.Helper()
	b.eventually(replica+" and "+node, func() error {
		if b.replicas[replica].fleet.Standing(node) != want {
			return errors.New("connected: want " + map[bool]string{true: "yes", false: "no"}[want])
		}
		return nil
	})
}

// P17: a replica that lags behind the others, or is cut off from them, does not take from a node the replicas that it has
// not heard of, whenever it speaks; a replica that none of them names any more is let go.
func TestReplicasThatLagBehind(t *testing.T) {
	b := newBed(t, "cp1", "cp2", "cp3")
	n := b.join("w1", containers{})
	b.awaitReady("w1", v1.ConditionTrue)
	all := []string{"cp1", "cp2", "cp3"}
	for _, r := range all {
		b.standing("w1", r, true)
		b.heard("w1", r)
	}
	want := b.addresses()
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
		b.tell(lag.who, lag.says...)
		b.heard("w1", lag.who)
		if got := known(); !slices.Equal(got, want) {
			t.Errorf("after %s named %v the node knows %v of %v", lag.who, lag.says, got, want)
		}
	}
	for _, r := range all {
		b.heard("w1", r)
	}
	b.tell("cp1", "cp1", "cp2")
	b.standing("w1", "cp3", false)
	if got := known(); len(got) != 2 || slices.Contains(got, b.replicas["cp3"].address) {
		t.Errorf("the node knows %v, with %s that was taken out", got, b.replicas["cp3"].address)
	}
	b.tell("cp2", all...)
	b.standing("w1", "cp3", true)
}

// A replica that does not know itself to be one of them has no word in who they are: an agent of the release before
// believes whom it hears last.
func TestWhoIsNoMemberNamesNobody(t *testing.T) {
	b := newBed(t, "cp1", "cp2")
	s, err := b.raw("w1", b.replicas["cp2"].address).Standby(b.ctx)
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
	b.tell("cp2", "cp1")
	if got := names(); got != 0 {
		t.Errorf("taken out it names %d", got)
	}
	b.tell("cp2", "cp1", "cp2")
	if got := names(); got != 2 {
		t.Errorf("as a member again it names %d", got)
	}
}
