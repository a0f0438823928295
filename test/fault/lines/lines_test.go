// Package lines cuts the links of a group of replicas as a network does: the kernel drops their
// packets, in the test's own network namespace. A replica that is cut off then meets conditions
// that no simulation has: dials that are not refused, and connections on which the kernel
// retransmits at growing intervals.
package lines

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
	"keelson.dev/keelson/raftstore/storetest/linear"
	"keelson.dev/keelson/raftstore/storetest/nemesis"
)

// inside is set in the environment of the process that has the namespace.
const inside = "KEELSON_TEST_LINES"

// TestMain runs the tests in a process with a network of its own.
func TestMain(m *testing.M) {
	if os.Getenv(inside) != "" || missingSupport() != nil {
		os.Exit(m.Run())
	}
	cmd := exec.Command(os.Args[0], os.Args[1:]...)
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		os.Exit(exit.ExitCode())
	case err != nil:
		fmt.Fprintln(os.Stderr, "tests in a network namespace:", err)
		os.Exit(1)
	}
}

// missingSupport returns the reason why this machine cannot run the tests, or nil.
func missingSupport() error {
	if os.Geteuid() != 0 {
		return errors.New("only root may make a network namespace")
	}
	_, err := exec.LookPath("nft")
	return err
}

// filteredCluster is a cluster as the target of fault plans, with links that the kernel's packet
// filter cuts.
type filteredCluster struct {
	nemesis.Group
	t *testing.T
	c *storetest.Cluster

	mu    sync.Mutex
	ports map[string]string // of the replicas' peer listeners
}

// newFilteredCluster starts three replicas with production timeouts.
func newFilteredCluster(t *testing.T) *filteredCluster {
	if err := missingSupport(); err != nil {
		t.Skipf("lines cannot be cut on this machine: %v", err)
	}
	if err := enableLoopback(); err != nil {
		t.Fatal(err)
	}
	l := &filteredCluster{t: t, ports: make(map[string]string)}
	l.c = storetest.NewCluster(t, 3, func(cfg *replica.Config) {
		_, port, err := net.SplitHostPort(cfg.Network.Advertise)
		if err != nil {
			t.Fatal(err)
		}
		l.mu.Lock()
		l.ports[cfg.Name] = port
		l.mu.Unlock()
		// The packet filter identifies the replica by the source address of a connection.
		dialer := &net.Dialer{KeepAlive: 5 * time.Second,
			LocalAddr: &net.TCPAddr{IP: net.ParseIP(sourceAddress(cfg.Name))}}
		cfg.Network.Dial = func(ctx context.Context, address string) (net.Conn, error) {
			return dialer.DialContext(ctx, "tcp", address)
		}
	})
	l.Group = l.c.Target()
	l.runNft("add table ip lines")
	l.runNft("add chain ip lines cut { type filter hook input priority 0; }")
	t.Cleanup(l.Heal)
	return l
}

// sourceAddress returns the address from which a replica dials: r2 from 127.0.0.12.
func sourceAddress(name string) string { return "127.0.0.1" + strings.TrimPrefix(name, "r") }

func enableLoopback() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("bringing up loopback: %w", err)
	}
	defer unix.Close(fd)
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("bringing up loopback: %w", err)
	}
	lo.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo); err != nil {
		return fmt.Errorf("bringing up loopback: %w", err)
	}
	return nil
}

func (l *filteredCluster) runNft(rule string) {
	if out, err := exec.Command("nft", rule).CombinedOutput(); err != nil {
		l.t.Errorf("nft %s: %v: %s", rule, err, out)
	}
}

// Cut implements nemesis.Group: packets of one replica to another are dropped,
// on connections that either of them has made.
func (l *filteredCluster) Cut(from, to string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.runNft(fmt.Sprintf("add rule ip lines cut ip saddr %s tcp dport %s drop", sourceAddress(from), l.ports[to]))
	l.runNft(fmt.Sprintf("add rule ip lines cut ip daddr %s tcp sport %s drop", sourceAddress(to), l.ports[from]))
}

// Heal implements nemesis.Group.
func (l *filteredCluster) Heal() { l.runNft("flush chain ip lines cut") }

// Random clients on all replicas see one linear history, and watchers see just
// that, while lines are cut for long in every way. F53
func TestLinearizableThroughCuts(t *testing.T) {
	l := newFilteredCluster(t)
	plan := nemesis.New(1, 5*time.Second, []nemesis.Fault{
		nemesis.IsolateLeader, nemesis.IsolateAny, nemesis.MuteLeader, nemesis.DeafLeader, nemesis.MuteFollower,
		nemesis.DeafFollower,
		nemesis.BridgeLeader, nemesis.BridgeFollower, nemesis.FlappingLine, nemesis.Install,
	})
	for i := range plan {
		plan[i].Hold *= 4
	}
	var places []linear.Place
	for _, name := range l.c.Names() {
		places = append(places, func() (linear.Door, bool) { return l.c.Door(name) })
	}
	w, err := linear.Start(t.Context(), linear.Options{Seed: 1}, places...)
	if err != nil {
		t.Fatal(err)
	}
	plan.Run(t.Context(), l, t.Logf)
	w.Stop()
	l.c.AwaitReady()
	door, _ := l.c.Door(l.c.Leader())
	settling, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	settled := w.Settle(settling, door)
	rep := w.Check(linear.CheckOptions{Skew: nemesis.Skew})
	rep.Violations = append(rep.Violations, settled.Violations...)
	t.Log(rep)
	if err := rep.Err(); err != nil {
		t.Error(err)
	}
	if rep.Acknowledged < 100 || rep.Deliveries < 100 {
		t.Errorf("hardly anything was checked: %v", rep)
	}
}

// A replica that was cut off serves again soon after its link is restored, and not only after as
// long as the link was cut, which is when the kernel would retransmit pending data.
func TestCutOffReplicaServesSoonAfter(t *testing.T) {
	l := newFilteredCluster(t)
	const cut, soon = 16 * time.Second, 8 * time.Second
	name := l.c.Followers()[0]
	r := l.c.Replica(name)
	for _, other := range l.Names() {
		if other != name {
			l.Cut(name, other)
			l.Cut(other, name)
		}
	}
	for whole := time.Now().Add(cut); time.Now().Before(whole); { // calls are under way all the time
		_ = listWithin(r, 300*time.Millisecond)
	}
	if err := listWithin(r, 300*time.Millisecond); !errors.Is(err, raftstore.ErrUnavailable) {
		t.Fatalf("read at a replica that is cut off: %v", err)
	}
	l.Heal()
	if err := listWithin(r, soon); err != nil {
		t.Errorf("%s after a line was whole again that had been cut for %s: %v", soon, cut, err)
	}
}

func listWithin(r *replica.Replica, within time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	_, err := r.List(ctx, "/", raftstore.ListOptions{})
	return err
}
