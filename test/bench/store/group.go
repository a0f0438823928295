package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"keelson.dev/keelson/raftstore/storetest"
	"keelson.dev/keelson/test/bench/procfs"
	"keelson.dev/keelson/test/bench/store/drive"
)

const (
	membersOfGroup = 3
	startTimeout   = 60 * time.Second
)

// group is three members in three processes, and clients in a fourth.
type group struct {
	name     string // as it stands in the results: "bolt", "wal", "etcd"
	programs struct{ member, load program }
	members  []*member
	load     *process // nil until the group is up
	joins    bool     // members join one after the other; otherwise all know all from the start
	inside   bool     // members take the orders of clients too
	ended    float64  // seconds of CPU of processes that others have taken the place of
}

// member is one member: its place, and its process while it runs.
type member struct {
	setup drive.Setup
	*process
}

// newGroup prepares a group below dir.
func newGroup(name, dir string) (*group, error) {
	g := &group{name: name}
	for i := range membersOfGroup {
		addresses, err := freeAddresses(2)
		if err != nil {
			return nil, err
		}
		s := drive.Setup{Name: fmt.Sprintf("r%d", i+1), Peer: addresses[0], Door: addresses[1]}
		s.Dir = filepath.Join(dir, name, s.Name)
		g.members = append(g.members, &member{setup: s})
	}
	return g, nil
}

// Ports are taken from below the kernel's range for outgoing connections: one
// that is free now could else be such a connection's when its member starts.
const (
	firstPort = 20_000
	lastPort  = 32_000
)

// freeAddresses are addresses on loopback that nobody listens on.
func freeAddresses(n int) ([]string, error) {
	var out []string
	for tries := 0; len(out) < n; tries++ {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", firstPort+rand.IntN(lastPort-firstPort)))
		if err != nil {
			if tries > 100 {
				return nil, fmt.Errorf("no port is free on loopback: %w", err)
			}
			continue
		}
		defer l.Close()
		out = append(out, l.Addr().String())
	}
	return out, nil
}

// newKeelson prepares a group of replicas, whose program is self.
func newKeelson(self, logStore, dir string) (*group, error) {
	g, err := newGroup(logStore, dir)
	if err != nil {
		return nil, err
	}
	authority, err := storetest.NewAuthority()
	if err != nil {
		return nil, err
	}
	key, err := authority.Marshal()
	if err != nil {
		return nil, err
	}
	g.programs.member, g.programs.load = program{self, drive.RoleMember}, program{self, drive.RoleLoad}
	g.joins, g.inside = true, true
	for i, m := range g.members {
		m.setup.Bootstrap, m.setup.LogStore, m.setup.Authority = i == 0, logStore, key
	}
	return g, nil
}

// remove ends the group and takes its data away.
func (g *group) remove() {
	g.down()
	for _, m := range g.members {
		_ = os.RemoveAll(m.setup.Dir) // what is left goes with the folder above
	}
}

// up starts all members, and the clients with some connections to each.
func (g *group) up(ctx context.Context, conns int) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for i, m := range g.members {
		if err := g.startMember(m); err != nil {
			return err
		}
		if i > 0 && g.joins {
			if _, err := g.members[0].do(ctx, drive.Order{Do: drive.DoAdd, Member: m.setup.Name, Address: m.setup.Peer}); err != nil {
				return fmt.Errorf("adding %s: %w", m.setup.Name, err)
			}
		}
	}
	if err := g.awaitReady(ctx); err != nil {
		return err
	}
	clients := drive.Setup{Name: "clients", Conns: conns}
	for _, m := range g.members {
		clients.Members = append(clients.Members, drive.Address{Member: m.setup.Name, Address: m.setup.Door})
	}
	var err error
	if g.load, err = g.programs.load.start(g.name+" clients", clients); err != nil {
		return err
	}
	// They take orders once they are connected, to members that must be there.
	if _, err = g.load.do(ctx, drive.Order{Do: drive.DoEnd}); err != nil {
		return fmt.Errorf("connecting: %w", err)
	}
	return nil
}

func (g *group) startMember(m *member) (err error) {
	if m.process != nil {
		g.ended += m.spent()
	}
	m.process, err = g.programs.member.start(g.name+" "+m.setup.Name, m.setup)
	return err
}

// down ends all processes of the group. Nothing of it is needed any more, so
// that nobody is asked to end in an orderly way.
func (g *group) down() {
	if g.load != nil {
		g.load.kill()
	}
	for _, m := range g.members {
		if m.process != nil {
			m.kill()
		}
	}
}

// awaitReady waits until every member is ready and all name the same leader.
func (g *group) awaitReady(ctx context.Context) error {
	_, err := g.awaitLeader(ctx, g.members)
	return err
}

var errUnsettled = errors.New("not settled")

// awaitLeader waits until the given members are ready and name the same leader.
func (g *group) awaitLeader(ctx context.Context, among []*member) (*member, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		m, err := g.leader(ctx, among)
		if err == nil || !errors.Is(err, errUnsettled) {
			return m, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("group %s is not ready in time: %w", g.name, err)
		}
	}
}

// leader asks the given members who leads.
func (g *group) leader(ctx context.Context, among []*member) (*member, error) {
	leader := ""
	for _, m := range among {
		r, err := m.do(ctx, drive.Order{Do: drive.DoStatus})
		if err != nil {
			return nil, err
		}
		if !r.Ready || r.Leader == "" || leader != "" && r.Leader != leader {
			return nil, errUnsettled
		}
		leader = r.Leader
	}
	for _, m := range among {
		if m.setup.Name == leader {
			return m, nil
		}
	}
	return nil, errUnsettled // it is not among them any more
}

// others are the members without one of them.
func (g *group) others(without *member) []*member {
	return slices.DeleteFunc(slices.Clone(g.members), func(m *member) bool { return m == without })
}

func names(members []*member) []string {
	var out []string
	for _, m := range members {
		out = append(out, m.setup.Name)
	}
	return out
}

// spent is the CPU time of all processes of the group so far, in seconds.
func (g *group) spent() float64 {
	out := g.ended
	if g.load != nil {
		out += g.load.spent()
	}
	for _, m := range g.members {
		if m.process != nil {
			out += m.spent()
		}
	}
	return out
}

// meter tells what the processes of the group cost.
func (g *group) meter() procfs.Meter {
	out := procfs.Meter{Processes: make(map[string]int)}
	for _, m := range g.members {
		out.Processes[m.setup.Name] = m.cmd.Process.Pid
	}
	if g.load != nil {
		out.Processes["clients"] = g.load.cmd.Process.Pid
	}
	out.Whole = slices.Collect(maps.Keys(out.Processes))
	return out
}
