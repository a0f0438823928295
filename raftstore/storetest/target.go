package storetest

import (
	"context"
	"time"

	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest/nemesis"
)

// Target returns the cluster as the target of a nemesis: the object on which planned faults are
// injected. If an operation fails that must succeed with a majority, such as adding a member, the
// test fails.
func (c *Cluster) Target() nemesis.Group { return target{c} }

type target struct{ *Cluster }

// Start implements nemesis.Group. It has no effect if the replica is running.
func (g target) Start(name string) {
	if g.Replica(name) == nil {
		g.Cluster.Start(name)
	}
}

// Cut implements nemesis.Group.
func (g target) Cut(from, to string) { g.Network.CutOneWay(from, to) }

// Slow implements nemesis.Group.
func (g target) Slow(delay, jitter time.Duration) { g.SlowAll(delay, jitter) }

// Heal implements nemesis.Group.
func (g target) Heal() { g.Network.Heal() }

// Jump implements nemesis.Group.
func (g target) Jump(name string, by time.Duration) { g.Clock(name).Set(by) }

// Transfer implements nemesis.Group. A failure is only logged.
func (g target) Transfer(from string) {
	g.try("transfer from "+from, g.Replica(from), (*replica.Replica).TransferLeadership)
}

// Snapshot implements nemesis.Group. A failure is only logged.
func (g target) Snapshot(name string) {
	g.try("snapshot on "+name, g.Replica(name), (*replica.Replica).Snapshot)
}

// Compact implements nemesis.Group. It retains the last 30 revisions. A failure is only logged.
func (g target) Compact() {
	r := g.Replica(g.Leader())
	g.try("compaction", r, func(r *replica.Replica, ctx context.Context) error {
		return r.Compact(ctx, max(r.Applied(), 30)-30)
	})
}

// Favour returns a target of a nemesis that moves leadership to the named replica before every
// second call of Leader. Faults of "the leader" therefore often affect that replica.
func (c *Cluster) Favour(name string) nemesis.Group { return &favouring{target: target{c}, name: name} }

// favouring is the target that Favour returns. looks counts the calls of Leader.
type favouring struct {
	target
	name  string
	looks int
}

// Leader implements nemesis.Group.
func (g *favouring) Leader() string {
	leader := g.target.Leader()
	if g.looks++; g.looks%2 == 0 || leader == g.name {
		return leader
	}
	g.try("moving leadership to "+g.name, g.Replica(leader), func(r *replica.Replica, ctx context.Context) error {
		_, err := r.StepDown(ctx, g.name)
		return err
	})
	return g.target.Leader()
}

// try calls do for a replica with a timeout of five seconds. An error is only logged, together with
// the description in the parameter what, because the operation may fail, for example after
// leadership has moved. A nil replica is skipped.
func (g target) try(what string, r *replica.Replica, do func(r *replica.Replica, ctx context.Context) error) {
	if r == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := do(r, ctx); err != nil {
		g.t.Logf("%s: %v", what, err)
	}
}

// Remove implements nemesis.Group, through another running replica.
func (g target) Remove(name string) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := g.Other(name).RemoveMember(ctx, name); err != nil {
		g.t.Errorf("removing %s: %v", name, err)
	}
}

// Add implements nemesis.Group, through another running replica.
func (g target) Add(name string) { g.Join(name) }
