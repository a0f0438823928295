package storeproc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
)

func TestMain(m *testing.M) {
	Main()
	if dir := os.Getenv(parentIn); dir != "" {
		startGroupAndWait(dir)
	}
	os.Exit(m.Run())
}

// parentIn makes the test binary start a group in a folder and wait for its end.
const parentIn = "KEELSON_TEST_PARENT"

func startGroupAndWait(dir string) {
	g, err := Start(context.Background(), Options{Dir: dir, Settings: Settings{NoSync: true}})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	for _, m := range g.Members() {
		fmt.Println(m.PID())
	}
	fmt.Println(g.sockets)
	select {}
}

// Replicas exit with the process that started them, also paused replicas.
func TestReplicasDieWithTheirParent(t *testing.T) {
	self, err := os.Executable()
	requireNoError(t, err)
	parent := exec.Command(self)
	parent.Env = append(os.Environ(), parentIn+"="+t.TempDir())
	out, err := parent.StdoutPipe()
	requireNoError(t, err)
	requireNoError(t, parent.Start())
	t.Cleanup(func() { parent.Process.Kill(); parent.Wait() })
	var pids [3]int
	var sockets string
	if _, err := fmt.Fscan(out, &pids[0], &pids[1], &pids[2], &sockets); err != nil {
		t.Fatalf("the parent does not start: %v", err)
	}
	t.Cleanup(func() { os.RemoveAll(sockets) })
	requireNoError(t, syscall.Kill(pids[1], syscall.SIGSTOP), parent.Process.Kill())
	ctx := testContext(t, patience)
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for _, pid := range pids {
		for isAlive(pid) {
			select {
			case <-tick.C:
			case <-ctx.Done():
				syscall.Kill(pid, syscall.SIGKILL)
				t.Fatalf("replica process %d outlives its parent", pid)
			}
		}
	}
}

// isAlive reports whether a process exists and is not a zombie.
func isAlive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	return !strings.HasPrefix(rest, "Z")
}

const patience = 2 * time.Minute

func testContext(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func startGroup(t *testing.T, o Options) *Group {
	t.Helper()
	o.Dir = t.TempDir()
	g, err := Start(testContext(t, patience), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
	return g
}

// putKey commits a value as soon as there is a leader.
func putKey(t *testing.T, s raftstore.Store, key, value string) error {
	return putWithin(t, patience, s, key, value)
}

// inVain is the waiting time for events that must not occur.
const inVain = 2 * time.Second

func putWithin(t *testing.T, limit time.Duration, s raftstore.Store, key, value string) error {
	_, err := s.Commit(testContext(t, limit), raftstore.Commit{Ops: []raftstore.Op{raftstore.Put(key, []byte(value))}})
	return err
}

func getValue(t *testing.T, s raftstore.Store, key string) string {
	t.Helper()
	it, _, err := s.Get(testContext(t, patience), key, raftstore.ReadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return string(it.Value)
}

func requireNoError(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// A killed or paused replica does not stop the others, and comes back with all data.
func TestProcessesComeAndGo(t *testing.T) {
	g := startGroup(t, Options{Settings: Settings{NoSync: true}})
	ctx := testContext(t, patience)
	leader, err := g.Leader(ctx)
	requireNoError(t, err)
	other := g.Members()[0]
	if other == leader {
		other = g.Members()[1]
	}
	requireNoError(t, putKey(t, leader.Store(), "/a", "1"), leader.Kill(), putKey(t, other.Store(), "/a", "2"))
	requireNoError(t, leader.Start(ctx), g.AwaitReady(ctx))
	if got := getValue(t, leader.Store(), "/a"); got != "2" {
		t.Errorf("the killed one reads %q", got)
	}
	requireNoError(t, other.Pause())
	if err := putWithin(t, inVain, other.Store(), "/a", "3"); !errors.Is(err, raftstore.ErrOutcomeUnknown) {
		t.Errorf("commit on a paused replica: %v", err)
	}
	requireNoError(t, putKey(t, leader.Store(), "/b", "1"), other.Resume(ctx), other.Stop(), other.Start(ctx),
		g.AwaitReady(ctx))
	if got := getValue(t, other.Store(), "/b"); got != "1" {
		t.Errorf("the restarted one reads %q", got)
	}
	requireSameHash(t, g)
}

func requireSameHash(t *testing.T, g *Group) {
	t.Helper()
	ctx := testContext(t, patience)
	hashes := make(map[string]string)
	for _, m := range g.Members() {
		_, err := m.Store().Sync(ctx)
		requireNoError(t, err)
	}
	for _, m := range g.Members() {
		_, hash, err := m.Hash(ctx)
		requireNoError(t, err)
		hashes[hash] += m.Name
	}
	if len(hashes) != 1 {
		t.Errorf("states differ: %v", hashes)
	}
}

// A cut in one direction or both, or a slow link, shows only in the protocol's behavior.
func TestCables(t *testing.T) {
	g := startGroup(t, Options{Settings: Settings{NoSync: true}})
	ctx := testContext(t, patience)
	leader, err := g.Leader(ctx)
	requireNoError(t, err)
	requireNoError(t, g.Isolate(ctx, leader))
	if err := putWithin(t, inVain, leader.Store(), "/cut", "x"); err == nil {
		t.Error("a leader without followers commits")
	}
	var next *Member
	for next == nil || next == leader {
		next, err = g.Leader(ctx)
		requireNoError(t, err)
	}
	requireNoError(t, putKey(t, next.Store(), "/a", "1"), g.MendAll(ctx))
	if got := getValue(t, leader.Store(), "/a"); got != "1" {
		t.Errorf("the deposed leader reads %q", got)
	}
	// A replica that receives everything but cannot send cannot read either.
	requireNoError(t, g.CutOneWay(ctx, leader, g.Members()[0]), g.CutOneWay(ctx, leader, g.Members()[1]),
		g.CutOneWay(ctx, leader, g.Members()[2]))
	if _, err := leader.Store().Sync(testContext(t, time.Second)); err == nil {
		t.Error("a replica that cannot send makes linearizable reads")
	}
	requireNoError(t, g.MendAll(ctx))
	for _, a := range g.Members() {
		for _, b := range g.Members() {
			requireNoError(t, g.Slow(ctx, a, b, 20*time.Millisecond, 10*time.Millisecond))
		}
	}
	began := time.Now()
	requireNoError(t, putKey(t, leader.Store(), "/slow", "x"))
	if took := time.Since(began); took < 40*time.Millisecond {
		t.Errorf("a commit over cables of 20 ms took %s", took)
	}
	requireSameHash(t, g)
}

// Members come and go while the group works.
func TestMembershipOfProcesses(t *testing.T) {
	g := startGroup(t, Options{Settings: Settings{NoSync: true}})
	ctx := testContext(t, patience)
	fourth, err := g.Add(ctx)
	requireNoError(t, err)
	leader, err := g.Leader(ctx)
	requireNoError(t, err)
	requireNoError(t, putKey(t, fourth.Store(), "/a", "1"), g.Leave(ctx, leader), g.Remove(ctx, leader),
		putKey(t, fourth.Store(), "/a", "2"))
	if n := len(g.Members()); n != 3 {
		t.Errorf("%d members", n)
	}
	requireSameHash(t, g)
}

// The last log lines of a process are in the error when it exits by itself.
func TestUnexpectedEndIsTold(t *testing.T) {
	g, err := Start(testContext(t, patience), Options{Dir: t.TempDir(), Settings: Settings{NoSync: true}})
	requireNoError(t, err)
	m := g.Members()[1]
	requireNoError(t, m.Kill())
	requireNoError(t, os.RemoveAll(m.DataDir), os.WriteFile(m.DataDir, nil, 0o600))
	// Not a folder: the replica cannot open its disk.
	_ = m.Start(testContext(t, patience))
	if ended := m.Exited(); ended != nil {
		<-ended
	}
	err = g.Close()
	if err == nil || !strings.Contains(err.Error(), m.Name) ||
		!strings.Contains(err.Error(), filepath.Base(m.DataDir)) {
		t.Errorf("the exit of %s is reported as: %v", m.Name, err)
	}
	if left, _ := filepath.Glob(filepath.Join(g.sockets, "*")); len(left) != 0 {
		t.Errorf("sockets are left: %v", left)
	}
}
