package nemesis

import (
	"context"
	"time"
)

// run does one act and undoes it.
func (a Act) run(ctx context.Context, g Group, leader string) {
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
		a.down(ctx, g, g.Kill, leader)
	case KillFollower:
		a.down(ctx, g, g.Kill, follower)
	case KillFollowers:
		a.down(ctx, g, g.Kill, followers...)
	case KillAll:
		a.down(ctx, g, g.Kill, g.Names()...)
	case StopLeader:
		a.down(ctx, g, g.Stop, leader)
	case PauseLeader, PauseFollower:
		name := leader
		if a.Fault == PauseFollower {
			name = follower
		}
		g.Pause(name)
		wait(ctx, a.Hold)
		g.Resume(name)
	case ClockAhead, ClockBehind:
		by := a.By
		if a.Fault == ClockBehind {
			by = -by
		}
		g.Jump(leader, by)
		wait(ctx, a.Hold)
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
		a.members(ctx, g, leader, follower)
	case Install:
		a.cut(g, leader, followers, follower)
		wait(ctx, a.Hold)
		if a.Pick%2 == 0 {
			g.Compact() // so that it gets little history, and nearly everything without any
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
			wait(ctx, a.By/40)
			g.Heal()
			wait(ctx, a.By/80)
		}
	default:
		a.cut(g, leader, followers, follower)
		wait(ctx, a.Hold)
		g.Heal()
	}
}

// down takes replicas down and brings them up again.
func (a Act) down(ctx context.Context, g Group, how func(string), names ...string) {
	for _, name := range names {
		how(name)
	}
	wait(ctx, a.Hold)
	for _, name := range names {
		g.Start(name)
	}
}

// members changes the group. What is added is a member again when it returns.
func (a Act) members(ctx context.Context, g Group, leader, follower string) {
	if leader == follower {
		return // a group of one
	}
	name := follower
	if a.Fault == RemoveLeader {
		name = leader
	}
	if a.Fault == Replace {
		g.Kill(name)
	}
	g.Remove(name)
	wait(ctx, a.Hold)
	if a.Fault == Replace {
		g.Wipe(name)
		g.Start(name)
	}
	g.Add(name)
}

// cut is the faults of lines.
func (a Act) cut(g Group, leader string, followers []string, follower string) {
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
