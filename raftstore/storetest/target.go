package storetest

import (
	"context"
	"time"

	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest/nemesis"
)

// Target returns the cluster as a nemesis.Group, into which planned faults can be injected. An
// operation that must succeed while there is a majority, such as adding a member, fails the test if
// it fails.
func (c *Cluster) Target() nemesis.Group { return target{c} }

// target is the nemesis.Group that Target returns.
type target struct{ cluster *Cluster }

// Names implements nemesis.Group.
func (g target) Names() []string { return g.cluster.Names() }

// Leader implements nemesis.Group.
func (g target) Leader() string { return g.cluster.Leader() }

// Kill implements nemesis.Group.
func (g target) Kill(name string) { g.cluster.Kill(name) }

// Stop implements nemesis.Group.
func (g target) Stop(name string) { g.cluster.Stop(name) }

// Pause implements nemesis.Group.
func (g target) Pause(name string) { g.cluster.Pause(name) }

// Resume implements nemesis.Group.
func (g target) Resume(name string) { g.cluster.Resume(name) }

// Wipe implements nemesis.Group.
func (g target) Wipe(name string) { g.cluster.Wipe(name) }

// Start implements nemesis.Group. It has no effect if the replica is running.
func (g target) Start(name string) {
	if g.cluster.Replica(name) == nil {
		g.cluster.Start(name)
	}
}

// Cut implements nemesis.Group.
func (g target) Cut(from, to string) { g.cluster.Network.CutOneWay(from, to) }

// Slow implements nemesis.Group.
func (g target) Slow(delay, jitter time.Duration) { g.cluster.SlowAll(delay, jitter) }

// Heal implements nemesis.Group.
func (g target) Heal() { g.cluster.Network.Heal() }

// Jump implements nemesis.Group.
func (g target) Jump(name string, by time.Duration) { g.cluster.Clock(name).Set(by) }

// Transfer implements nemesis.Group. A failure is only logged.
func (g target) Transfer(from string) {
	g.try("transfer from "+from, g.cluster.Replica(from), (*replica.Replica).TransferLeadership)
}

// Snapshot implements nemesis.Group. A failure is only logged.
func (g target) Snapshot(name string) {
	g.try("snapshot on "+name, g.cluster.Replica(name), (*replica.Replica).Snapshot)
}

// Compact implements nemesis.Group. It retains the last 30 revisions. A failure is only logged.
func (g target) Compact() {
	r := g.cluster.Replica(g.Leader())
	g.try("compaction", r, func(r *replica.Replica, ctx context.Context) error {
		return r.Compact(ctx, max(r.Applied(), 30)-30)
	})
}

// Favour returns a nemesis.Group for the cluster that transfers leadership to the replica with the
// given name before every second call of Leader. Faults that affect the leader therefore often
// affect that replica.
func (c *Cluster) Favour(name string) nemesis.Group { return &favouring{target: target{c}, name: name} }

// favouring is a nemesis.Group in which one replica is the leader more often than the others:
// before every second call of Leader, it receives the leadership. looks counts the calls of Leader.
type favouring struct {
	target
	name  string
	looks int
}

// Leader implements nemesis.Group. Before every second call it transfers leadership to the favored
// replica.
func (g *favouring) Leader() string {
	leader := g.target.Leader()
	if g.looks++; g.looks%2 == 0 || leader == g.name {
		return leader
	}
	g.try("moving leadership to "+g.name, g.cluster.Replica(leader),
		func(r *replica.Replica, ctx context.Context) error {
			_, err := r.StepDown(ctx, g.name)
			return err
		})
	return g.target.Leader()
}

// try calls do with the replica and a context that ends after five seconds. An error is only
// logged, with the description what, because the operation may fail, for example after leadership
// has moved. If the replica is nil, do is not called.
func (g target) try(what string, r *replica.Replica, do func(r *replica.Replica, ctx context.Context) error) {
	if r == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := do(r, ctx); err != nil {
		g.cluster.t.Logf("%s: %v", what, err)
	}
}

// Remove implements nemesis.Group. The change is requested through another running replica.
func (g target) Remove(name string) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := g.cluster.Other(name).RemoveMember(ctx, name); err != nil {
		g.cluster.t.Errorf("removing %s: %v", name, err)
	}
}

// Add implements nemesis.Group. The change is requested through another running replica.
func (g target) Add(name string) { g.cluster.Join(name) }
