package nemesis

import (
	"context"
	"time"
)

// injectFault injects the fault of the act into g, and undoes it after Hold. leader is the name of
// the current leader. If the fault affects a follower, Pick selects it.
func (a Act) injectFault(ctx context.Context, g Group, leader string) {
	var followers []string
	for _, name := range g.Names() {
		if name != leader {
			followers = append(followers, name)
		}
	}
	follower := leader
	if len(followers) > 0 {
		follower = followers[a.Pick%len(followers)]
	}
	switch a.Fault {
	case KillLeader:
		a.stopAndRestart(ctx, g, g.Kill, leader)
	case KillFollower:
		a.stopAndRestart(ctx, g, g.Kill, follower)
	case KillFollowers:
		a.stopAndRestart(ctx, g, g.Kill, followers...)
	case KillAll:
		a.stopAndRestart(ctx, g, g.Kill, g.Names()...)
	case StopLeader:
		a.stopAndRestart(ctx, g, g.Stop, leader)
	case PauseLeader, PauseFollower:
		name := leader
		if a.Fault == PauseFollower {
			name = follower
		}
		g.Pause(name)
		waitFor(ctx, a.Hold)
		g.Resume(name)
	case ClockAhead, ClockBehind:
		by := a.By
		if a.Fault == ClockBehind {
			by = -by
		}
		g.Jump(leader, by)
		waitFor(ctx, a.Hold)
		g.Jump(leader, 0)
	case Transfer:
		g.Transfer(leader)
	case Compact:
		g.Compact()
	case SnapshotAll:
		for _, name := range g.Names() {
			g.Snapshot(name)
		}
	case RemoveFollower, RemoveLeader, Replace:
		a.changeMembers(ctx, g, leader, follower)
	case Install:
		a.cutLines(g, leader, followers, follower)
		waitFor(ctx, a.Hold)
		if a.Pick%2 == 0 {
			g.Compact() // then the snapshot that is installed contains little history
		}
		for _, name := range g.Names() {
			if name != follower {
				g.Snapshot(name)
			}
		}
		g.Heal()
	case FlappingLine:
		for until := time.Now().Add(a.Hold); leader != follower && time.Now().Before(until) && ctx.Err() == nil; {
			g.Cut(leader, follower)
			g.Cut(follower, leader)
			waitFor(ctx, a.By/40)
			g.Heal()
			waitFor(ctx, a.By/80)
		}
	default:
		a.cutLines(g, leader, followers, follower)
		waitFor(ctx, a.Hold)
		g.Heal()
	}
}

// stopAndRestart stops the replicas with the given names by calling how (Group.Kill or Group.Stop),
// waits for Hold, and starts them again.
func (a Act) stopAndRestart(ctx context.Context, g Group, how func(string), names ...string) {
	for _, name := range names {
		how(name)
	}
	waitFor(ctx, a.Hold)
	for _, name := range names {
		g.Start(name)
	}
}

// changeMembers removes a replica from the raft cluster, waits for Hold, and adds it again. It
// removes the leader for the fault RemoveLeader, and otherwise the follower. For the fault Replace,
// the follower is killed before it is removed, and starts again with an empty disk. A cluster with
// only one replica is not changed.
func (a Act) changeMembers(ctx context.Context, g Group, leader, follower string) {
	if leader == follower {
		return // the cluster has a single replica
	}
	name := follower
	if a.Fault == RemoveLeader {
		name = leader
	}
	if a.Fault == Replace {
		g.Kill(name)
	}
	g.Remove(name)
	waitFor(ctx, a.Hold)
	if a.Fault == Replace {
		g.Wipe(name)
		g.Start(name)
	}
	g.Add(name)
}

// cutLines drops or delays the traffic between replicas as the fault requires. followers are all
// replicas except the leader; follower is the selected follower. Group.Heal undoes the fault.
func (a Act) cutLines(g Group, leader string, followers []string, follower string) {
	both := func(a, b string) {
		g.Cut(a, b)
		g.Cut(b, a)
	}
	others := func(name string, do func(name, other string)) {
		for _, other := range g.Names() {
			if other != name {
				do(name, other)
			}
		}
	}
	bridge := func(middle string) {
		for i, x := range g.Names() {
			for j, y := range g.Names() {
				if i < j && x != middle && y != middle && (len(followers) < 3 || i%2 != j%2) {
					both(x, y)
				}
			}
		}
	}
	switch a.Fault {
	case IsolateLeader:
		others(leader, both)
	case IsolateAny, Install:
		others(follower, both)
	case LeaderMinority:
		minority := map[string]bool{leader: true}
		if len(followers) >= 4 {
			minority[follower] = true
		}
		for _, x := range g.Names() {
			for _, y := range g.Names() {
				if minority[x] && !minority[y] {
					both(x, y)
				}
			}
		}
	case MuteLeader:
		others(leader, g.Cut)
	case DeafLeader:
		others(leader, func(name, other string) { g.Cut(other, name) })
	case MuteFollower:
		others(follower, g.Cut)
	case DeafFollower:
		others(follower, func(name, other string) { g.Cut(other, name) })
	case BridgeLeader:
		bridge(leader)
	case BridgeFollower:
		bridge(follower)
	case SlowLines:
		g.Slow(a.By/100, a.By/200)
	case JumbledLines:
		g.Slow(0, a.By/25)
	}
}
