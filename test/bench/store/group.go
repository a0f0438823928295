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

// group is a raft cluster of three members in three processes, and clients in a fourth process.
type group struct {
	name          string // name in the results: "bolt", "wal" or "etcd"
	programs      struct{ member, load program }
	members       []*member
	load          *process // nil until the group is up
	joinInTurn    bool     // members join one after the other; otherwise all are members from the start
	clientsInside bool     // members also run clients
	ended         float64  // CPU seconds of replaced processes
}

// member is one member: its setup, and its process while it runs.
type member struct {
	setup drive.Setup
	*process
}

// newGroup prepares a group with this name whose data is below dir. It starts no process.
func newGroup(name, dir string) (*group, error) {
	g := &group{name: name}
	for i := range membersOfGroup {
		addresses, err := freeAddresses(2)
		if err != nil {
			return nil, err
		}
		s := drive.Setup{Name: fmt.Sprintf("r%d", i+1), Peer: addresses[0], ClientAddress: addresses[1]}
		s.Dir = filepath.Join(dir, name, s.Name)
		g.members = append(g.members, &member{setup: s})
	}
	return g, nil
}

// Ports are below the kernel's range for outgoing connections. Otherwise an outgoing connection
// could use a free port before its member starts.
const (
	firstPort = 20_000
	lastPort  = 32_000
)

// freeAddresses returns free addresses on loopback.
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

// newKeelson prepares a group of replicas that run the program self.
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
	g.joinInTurn, g.clientsInside = true, true
	for i, m := range g.members {
		m.setup.Bootstrap, m.setup.LogStore, m.setup.Authority = i == 0, logStore, key
	}
	return g, nil
}

// removeData kills the group's processes and deletes its data.
func (g *group) removeData() {
	g.killAll()
	for _, m := range g.members {
		_ = os.RemoveAll(m.setup.Dir) // leftovers are deleted with the parent folder
	}
}

// startAll starts all members, and the clients with conns connections to each member.
func (g *group) startAll(ctx context.Context, conns int) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for i, m := range g.members {
		if err := g.startMember(m); err != nil {
			return err
		}
		if i > 0 && g.joinInTurn {
			if _, err := g.members[0].callProcess(ctx, drive.Request{Do: drive.DoAdd, Member: m.setup.Name,
				Address: m.setup.Peer}); err != nil {
				return fmt.Errorf("adding %s: %w", m.setup.Name, err)
			}
		}
	}
	if err := g.awaitReady(ctx); err != nil {
		return err
	}
	clients := drive.Setup{Name: "clients", Conns: conns}
	for _, m := range g.members {
		clients.Members = append(clients.Members,
			drive.Address{Member: m.setup.Name, Address: m.setup.ClientAddress})
	}
	var err error
	if g.load, err = g.programs.load.startProcess(g.name+" clients", clients); err != nil {
		return err
	}
	// The clients process requests only after they have connected to all members.
	if _, err = g.load.callProcess(ctx, drive.Request{Do: drive.DoEnd}); err != nil {
		return fmt.Errorf("connecting: %w", err)
	}
	return nil
}

func (g *group) startMember(m *member) (err error) {
	if m.process != nil {
		g.ended += m.cpuSeconds()
	}
	m.process, err = g.programs.member.startProcess(g.name+" "+m.setup.Name, m.setup)
	return err
}

// killAll kills all processes of the group. No orderly shutdown is needed, because the group is not
// used any more.
func (g *group) killAll() {
	if g.load != nil {
		g.load.killProcess()
	}
	for _, m := range g.members {
		if m.process != nil {
			m.killProcess()
		}
	}
}

// awaitReady waits until every member is ready and all report the same leader.
func (g *group) awaitReady(ctx context.Context) error {
	_, err := g.awaitLeader(ctx, g.members)
	return err
}

var errUnsettled = errors.New("the members are not ready or report different leaders")

// awaitLeader waits until the members candidates are ready and report the same leader, which must
// be one of them.
func (g *group) awaitLeader(ctx context.Context, candidates []*member) (*member, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		m, err := g.leader(ctx, candidates)
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

// leader returns the leader that all of the members candidates report, or errUnsettled.
func (g *group) leader(ctx context.Context, candidates []*member) (*member, error) {
	leader := ""
	for _, m := range candidates {
		r, err := m.callProcess(ctx, drive.Request{Do: drive.DoStatus})
		if err != nil {
			return nil, err
		}
		if !r.Ready || r.Leader == "" || leader != "" && r.Leader != leader {
			return nil, errUnsettled
		}
		leader = r.Leader
	}
	for _, m := range candidates {
		if m.setup.Name == leader {
			return m, nil
		}
	}
	return nil, errUnsettled // the reported leader is not among the given members
}

// membersExcept returns all members except excluded.
func (g *group) membersExcept(excluded *member) []*member {
	return slices.DeleteFunc(slices.Clone(g.members), func(m *member) bool { return m == excluded })
}

func names(members []*member) []string {
	var out []string
	for _, m := range members {
		out = append(out, m.setup.Name)
	}
	return out
}

// cpuSeconds returns the CPU seconds of all processes of the group so far.
func (g *group) cpuSeconds() float64 {
	out := g.ended
	if g.load != nil {
		out += g.load.cpuSeconds()
	}
	for _, m := range g.members {
		if m.process != nil {
			out += m.cpuSeconds()
		}
	}
	return out
}

// newMeter returns a meter of the group's current processes.
func (g *group) newMeter() procfs.Meter {
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
