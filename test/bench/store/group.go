package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"keelson.dev/keelson/raftstore/storetest"
)

// group is three replica processes.
type group struct {
	authority []byte
	members   []*member
}

type member struct {
	setup   setup
	cmd     *exec.Cmd
	orders  io.WriteCloser
	replies *json.Decoder
	mu      sync.Mutex // one order at a time
}

func startGroup(ctx context.Context, dir string) (*group, error) {
	authority, err := storetest.NewAuthority()
	if err != nil {
		return nil, err
	}
	g := new(group)
	if g.authority, err = authority.Marshal(); err != nil {
		return nil, err
	}
	for i := range 3 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		name := fmt.Sprintf("r%d", i+1)
		m := &member{setup: setup{Name: name, Dir: filepath.Join(dir, name), Address: l.Addr().String(), Bootstrap: i == 0, Authority: g.authority}}
		l.Close()
		if err := m.start(); err != nil {
			g.stop()
			return nil, err
		}
		g.members = append(g.members, m)
		if i > 0 {
			if _, err := g.members[0].order(order{Do: "add", ID: name, Address: m.setup.Address}); err != nil {
				g.stop()
				return nil, fmt.Errorf("adding %s: %w", name, err)
			}
		}
	}
	return g, g.awaitReady(ctx)
}

func (m *member) start() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	m.cmd = exec.Command(self, "-replica")
	m.cmd.Stderr = os.Stderr
	if m.orders, err = m.cmd.StdinPipe(); err != nil {
		return err
	}
	out, err := m.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	m.replies = json.NewDecoder(bufio.NewReader(out))
	if err := m.cmd.Start(); err != nil {
		return err
	}
	return json.NewEncoder(m.orders).Encode(m.setup)
}

func (m *member) order(o order) (reply, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := json.NewEncoder(m.orders).Encode(o); err != nil {
		return reply{}, err
	}
	var r reply
	if err := m.replies.Decode(&r); err != nil {
		return reply{}, fmt.Errorf("replica %s: %w", m.setup.Name, err)
	}
	if r.Error != "" {
		return r, errors.New(r.Error)
	}
	return r, nil
}

func (g *group) stop() {
	for _, m := range g.members {
		m.orders.Close()
		m.cmd.Wait()
	}
}

// awaitReady waits until every replica is ready and names the same leader.
func (g *group) awaitReady(ctx context.Context) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	late := time.After(30 * time.Second)
	for {
		if _, err := g.leader(); err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-late:
			return errors.New("replicas are not ready in time")
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (g *group) leader() (*member, error) {
	var leader string
	for _, m := range g.members {
		r, err := m.order(order{Do: "status"})
		if err != nil {
			return nil, err
		}
		if !r.Ready || r.Leader == "" || leader != "" && r.Leader != leader {
			return nil, errors.New("not settled")
		}
		leader = r.Leader
	}
	for _, m := range g.members {
		if m.setup.Name == leader {
			return m, nil
		}
	}
	return nil, errors.New("unknown leader")
}

// cpu is the CPU time spent by each replica, in seconds.
func (g *group) cpu() map[string]float64 {
	out := make(map[string]float64)
	for _, m := range g.members {
		out[m.setup.Name] = processCPU(m.cmd.Process.Pid)
	}
	return out
}

const ticksPerSecond = 100 // USER_HZ, fixed by the kernel's interface

func processCPU(pid int) float64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	// The name, in brackets, may hold spaces.
	fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	if len(fields) < 13 {
		return 0
	}
	user, _ := strconv.ParseFloat(fields[11], 64)
	system, _ := strconv.ParseFloat(fields[12], 64)
	return (user + system) / ticksPerSecond
}

// hostTimes are the busy and the total ticks of all processors.
func hostTimes() (busy, total float64) {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, 0
	}
	line, _, _ := strings.Cut(string(b), "\n")
	for i, f := range strings.Fields(line)[1:] {
		v, _ := strconv.ParseFloat(f, 64)
		if i < 8 {
			total += v
			if i != 3 && i != 4 { // idle, iowait
				busy += v
			}
		}
	}
	return busy, total
}

// metered runs a measure and adds what it cost.
func (g *group) metered(r *record, measure func() error) error {
	before := g.cpu()
	busy0, total0 := hostTimes()
	err := measure()
	busy1, total1 := hostTimes()
	r.CPU = make(map[string]float64)
	for name, after := range g.cpu() {
		r.CPU[name] = after - before[name]
	}
	if total1 > total0 {
		r.Busy = (busy1 - busy0) / (total1 - total0)
	}
	return err
}
