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
		beParent(dir)
	}
	os.Exit(m.Run())
}

// parentIn makes the test binary start a group in a folder and wait for its end.
const parentIn = "KEELSON_TEST_PARENT"

func beParent(dir string) {
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

// Replicas die with the process that started them, also those that are paused.
func TestReplicasDieWithTheirParent(t *testing.T) {
	self, err := os.Executable()
	must(t, err)
	parent := exec.Command(self)
	parent.Env = append(os.Environ(), parentIn+"="+t.TempDir())
	out, err := parent.StdoutPipe()
	must(t, err)
	must(t, parent.Start())
	t.Cleanup(func() { parent.Process.Kill(); parent.Wait() })
	var pids [3]int
	var sockets string
	if _, err := fmt.Fscan(out, &pids[0], &pids[1], &pids[2], &sockets); err != nil {
		t.Fatalf("the parent does not start: %v", err)
	}
	t.Cleanup(func() { os.RemoveAll(sockets) })
	must(t, syscall.Kill(pids[1], syscall.SIGSTOP), parent.Process.Kill())
	ctx := within(t, patience)
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for _, pid := range pids {
		for alive(pid) {
			select {
			case <-tick.C:
			case <-ctx.Done():
				syscall.Kill(pid, syscall.SIGKILL)
				t.Fatalf("replica process %d outlives its parent", pid)
			}
		}
	}
}

// alive is false also for one that only waits to be waited for.
func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	return !strings.HasPrefix(rest, "Z")
}

const patience = 2 * time.Minute

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func start(t *testing.T, o Options) *Group {
	t.Helper()
	o.Dir = t.TempDir()
	g, err := Start(within(t, patience), o)
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

// put commits, as soon as there is a leader.
func put(t *testing.T, s raftstore.Store, key, value string) error {
	return putWithin(t, patience, s, key, value)
}

// inVain is how long is waited for what must not come.
const inVain = 2 * time.Second

func putWithin(t *testing.T, limit time.Duration, s raftstore.Store, key, value string) error {
	_, err := s.Commit(within(t, limit), raftstore.Commit{Ops: []raftstore.Op{raftstore.Put(key, []byte(value))}})
	return err
}

func value(t *testing.T, s raftstore.Store, key string) string {
	t.Helper()
	it, _, err := s.Get(within(t, patience), key, raftstore.ReadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return string(it.Value)
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// A replica that is killed or paused stops nobody, and comes back with everything.
func TestProcessesComeAndGo(t *testing.T) {
	g := start(t, Options{Settings: Settings{NoSync: true}})
	ctx := within(t, patience)
	leader, err := g.Leader(ctx)
	must(t, err)
	other := g.Members()[0]
	if other == leader {
		other = g.Members()[1]
	}
	must(t, put(t, leader.Store(), "/a", "1"), leader.Kill(), put(t, other.Store(), "/a", "2"))
	must(t, leader.Start(ctx), g.AwaitReady(ctx))
	if got := value(t, leader.Store(), "/a"); got != "2" {
		t.Errorf("the killed one reads %q", got)
	}
	must(t, other.Pause())
	if err := putWithin(t, inVain, other.Store(), "/a", "3"); !errors.Is(err, raftstore.ErrOutcomeUnknown) {
		t.Errorf("commit on a paused replica: %v", err)
	}
	must(t, put(t, leader.Store(), "/b", "1"), other.Resume(ctx), other.Stop(), other.Start(ctx), g.AwaitReady(ctx))
	if got := value(t, other.Store(), "/b"); got != "1" {
		t.Errorf("the restarted one reads %q", got)
	}
	sameEverywhere(t, g)
}

func sameEverywhere(t *testing.T, g *Group) {
	t.Helper()
	ctx := within(t, patience)
	hashes := make(map[string]string)
	for _, m := range g.Members() {
		_, err := m.Store().Sync(ctx)
		must(t, err)
	}
	for _, m := range g.Members() {
		_, hash, err := m.Hash(ctx)
		must(t, err)
		hashes[hash] += m.Name
	}
	if len(hashes) != 1 {
		t.Errorf("states differ: %v", hashes)
	}
}

// A cut in one direction or both, or a slow cable, is noticed by nobody but the protocol.
func TestCables(t *testing.T) {
	g := start(t, Options{Settings: Settings{NoSync: true}})
	ctx := within(t, patience)
	leader, err := g.Leader(ctx)
	must(t, err)
	must(t, g.Isolate(ctx, leader))
	if err := putWithin(t, inVain, leader.Store(), "/cut", "x"); err == nil {
		t.Error("a leader without followers commits")
	}
	var next *Member
	for next == nil || next == leader {
		next, err = g.Leader(ctx)
		must(t, err)
	}
	must(t, put(t, next.Store(), "/a", "1"), g.MendAll(ctx))
	if got := value(t, leader.Store(), "/a"); got != "1" {
		t.Errorf("the deposed leader reads %q", got)
	}
	// One that hears everything and is not heard cannot read either.
	must(t, g.CutOneWay(ctx, leader, g.Members()[0]), g.CutOneWay(ctx, leader, g.Members()[1]), g.CutOneWay(ctx, leader, g.Members()[2]))
	if _, err := leader.Store().Sync(within(t, time.Second)); err == nil {
		t.Error("one that nobody hears makes linearizable reads")
	}
	must(t, g.MendAll(ctx))
	for _, a := range g.Members() {
		for _, b := range g.Members() {
			must(t, g.Slow(ctx, a, b, 20*time.Millisecond, 10*time.Millisecond))
		}
	}
	began := time.Now()
	must(t, put(t, leader.Store(), "/slow", "x"))
	if took := time.Since(began); took < 40*time.Millisecond {
		t.Errorf("a commit over cables of 20 ms took %s", took)
	}
	sameEverywhere(t, g)
}

// Members come and go while the group works.
func TestMembershipOfProcesses(t *testing.T) {
	g := start(t, Options{Settings: Settings{NoSync: true}})
	ctx := within(t, patience)
	fourth, err := g.Add(ctx)
	must(t, err)
	leader, err := g.Leader(ctx)
	must(t, err)
	must(t, put(t, fourth.Store(), "/a", "1"), g.Leave(ctx, leader), g.Remove(ctx, leader), put(t, fourth.Store(), "/a", "2"))
	if n := len(g.Members()); n != 3 {
		t.Errorf("%d members", n)
	}
	sameEverywhere(t, g)
}

// What a process said last is in the error when it ends by itself.
func TestUnexpectedEndIsTold(t *testing.T) {
	g, err := Start(within(t, patience), Options{Dir: t.TempDir(), Settings: Settings{NoSync: true}})
	must(t, err)
	m := g.Members()[1]
	must(t, m.Kill())
	must(t, os.RemoveAll(m.DataDir), os.WriteFile(m.DataDir, nil, 0o600))
	// Not a folder: the replica cannot open its disk.
	_ = m.Start(within(t, patience))
	if ended := m.Ended(); ended != nil {
		<-ended
	}
	err = g.Close()
	if err == nil || !strings.Contains(err.Error(), m.Name) || !strings.Contains(err.Error(), filepath.Base(m.DataDir)) {
		t.Errorf("the end of %s is told as: %v", m.Name, err)
	}
	if left, _ := filepath.Glob(filepath.Join(g.sockets, "*")); len(left) != 0 {
		t.Errorf("sockets are left: %v", left)
	}
}
