package replica_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// roleLines collects what the replicas of a group log of their roles.
type roleLines struct {
	mu    sync.Mutex
	lines []string // "r1: follower -> leader: why"
}

// handler is the log of one replica.
type roleHandler struct {
	slog.Handler
	of   string
	into *roleLines
}

func (h roleHandler) Enabled(context.Context, slog.Level) bool { return true }
func (h roleHandler) WithAttrs([]slog.Attr) slog.Handler       { return h }
func (h roleHandler) Handle(_ context.Context, r slog.Record) error {
	if r.Message == "role changed" {
		said := map[string]string{}
		r.Attrs(func(a slog.Attr) bool { said[a.Key] = a.Value.String(); return true })
		h.into.mu.Lock()
		defer h.into.mu.Unlock()
		h.into.lines = append(h.into.lines, fmt.Sprintf("%s: %s -> %s: %s", h.of, said["from"], said["to"],
			said["reason"]))
	}
	return nil
}

// mark is a place in the lines.
func (l *roleLines) mark() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.lines)
}

// since are the lines after a mark.
func (l *roleLines) since(mark int) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.lines[mark:])
}

// await waits for a line after a mark that begins with what is wanted and goes on
// with one of the reasons.
func (l *roleLines) await(t *testing.T, c *storetest.Cluster, mark int, want string, reasons ...string) {
	t.Helper()
	defer func() {
		if t.Failed() {
			t.Logf("the log since then:\n%s", strings.Join(l.since(mark), "\n"))
		}
	}()
	found := ""
	c.Await(want, func() bool {
		for _, line := range l.since(mark) {
			if rest, ok := strings.CutPrefix(line, want); ok {
				found = rest
				return true
			}
		}
		return false
	})
	if !slices.ContainsFunc(reasons, func(r string) bool { return strings.HasPrefix(found, r) }) {
		t.Errorf("%s%s; want one of %q", want, found, reasons)
	}
}

func rolesOf(t *testing.T, n int) (*storetest.Cluster, *roleLines) {
	lines := &roleLines{}
	return storetest.NewCluster(t, n, func(cfg *replica.Config) {
		cfg.Logger = slog.New(roleHandler{of: cfg.Name, into: lines})
	}), lines
}

func term(c *storetest.Cluster, name string) uint64 { return c.Replica(name).Status().Term }

// Every change of role of a real group is one line with its reason, whatever
// raft's own log says of it.
func TestRolesTellTheirReasons(t *testing.T) {
	c, lines := rolesOf(t, 3)
	for _, name := range c.Names() {
		lines.await(t, c, 0, name+": none -> follower: ", "started")
	}
	lines.await(t, c, 0, "r1: follower -> candidate: ", "no leader is known")
	lines.await(t, c, 0, "r1: candidate -> leader: ", "elected in term")

	// A leader that is asked to.
	old, mark := c.Leader(), lines.mark()
	next, err := c.Replica(old).StepDown(within(t, patience), "")
	if err != nil {
		t.Fatal(err)
	}
	lines.await(t, c, mark, old+": leader -> follower: ", "asked to step down: transferring leadership to "+next)
	lines.await(t, c, mark, next+": follower -> candidate: ", "leader "+old+" transfers its leadership")
	lines.await(t, c, mark, next+": candidate -> leader: ", fmt.Sprintf("elected in term %d", term(c, next)))

	// One that is stopped, and one that falls.
	old, mark = c.Leader(), lines.mark()
	c.Stop(old)
	lines.await(t, c, mark, old+": leader -> follower: ", "stopping: transferring leadership to ")
	lines.await(t, c, mark, old+": follower -> none: ", "asked to stop")
	c.Start(old)
	c.AwaitReady()
	old, mark = c.Leader(), lines.mark()
	c.Kill(old)
	next = c.Leader()
	lines.await(t, c, mark, old+": leader -> none: ", "")
	lines.await(t, c, mark, next+": follower -> candidate: ", "the process of leader "+old+" has exited",
		"leader "+old+" is silent", "no leader is known")
	c.Start(old)
	c.AwaitReady()

	// One that is cut off.
	old, mark = c.Leader(), lines.mark()
	c.Isolate(old)
	c.Await("another leader", func() bool {
		next = c.Other(old).Status().Leader
		return next != old && next != ""
	})
	// Who misses it first says so. The other may have heard of that before it stands itself.
	lines.await(t, c, mark, next+": follower -> candidate: ", "leader "+old+" is silent", "no leader is known")
	if !slices.ContainsFunc(lines.since(mark), func(line string) bool {
		return strings.HasSuffix(line, ": follower -> candidate: leader "+old+" is silent")
	}) {
		t.Errorf("nobody says that %s is silent: %q", old, lines.since(mark))
	}
	c.Rejoin(old)
	c.AwaitReady()

	// The lines of a replica join up.
	role := map[string]string{}
	for _, line := range lines.since(0) {
		who, rest, _ := strings.Cut(line, ": ")
		from, rest, _ := strings.Cut(rest, " -> ")
		to, _, _ := strings.Cut(rest, ": ")
		if was := role[who]; was != from && (was != "" || from != "none") {
			t.Errorf("%s, which was %q before", line, was)
		}
		role[who] = to
	}
}

// What cables do to roles.
func TestRolesTellOfCables(t *testing.T) {
	c, lines := rolesOf(t, 3)
	old, mark := c.Leader(), lines.mark()
	others := c.Followers()
	c.Isolate(old)
	lines.await(t, c, mark, old+": leader -> follower: ",
		"lease lost: no answer in time from "+strings.Join(others, ", "))
	lines.await(t, c, mark, old+": follower -> candidate: ", "no leader is known")
	lines.await(t, c, mark, old+": candidate -> candidate: ",
		"no replica was elected in time: no answer from "+strings.Join(others, ", "))
	mark = lines.mark()
	c.Rejoin(old)
	lines.await(t, c, mark, old+": candidate -> follower: ", others[0]+" leads", others[1]+" leads",
		others[0]+" is in term", others[1]+" is in term", others[0]+" asks for votes", others[1]+" asks for votes")
	c.AwaitReady()

	// One that has lost only its leader is refused by those who have not.
	leader := c.Leader()
	lost, other := c.Followers()[0], c.Followers()[1]
	mark = lines.mark()
	c.Network.Cut(leader, lost)
	lines.await(t, c, mark, lost+": follower -> candidate: ", "leader "+leader+" is silent")
	lines.await(t, c, mark, lost+": candidate -> candidate: ",
		"no replica was elected in time: refused by "+other+"; no answer from "+leader)
	mark = lines.mark()
	c.Network.Mend(leader, lost)
	lines.await(t, c, mark, lost+": candidate -> follower: ", leader+" leads")
	c.AwaitReady()
}

// What others say deposes a leader: each of raft's ways to hear of a later term.
func TestRolesTellWhoIsLater(t *testing.T) {
	c, lines := rolesOf(t, 3)
	const later = 7
	for _, way := range []struct {
		depose func(leader, a, b *replica.Replica, term uint64) error
		reason func(a, b string, now uint64) string
	}{
		{func(leader, a, _ *replica.Replica, term uint64) error { return a.AskForVote(leader, term) },
			func(a, _ string, now uint64) string {
				return fmt.Sprintf("%s asks for votes in term %d, this replica was in term %d", a, now+later, now)
			}},
		{func(leader, a, _ *replica.Replica, term uint64) error { return a.SendHeartbeat(leader, term) },
			func(a, _ string, _ uint64) string { return a + " leads" }},
		{func(leader, a, b *replica.Replica, term uint64) error {
			if err := a.AskForVote(b, term); err != nil {
				return err
			}
			// The leader finds out by replicating.
			_, _ = leader.Commit(within(t, patience), raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/a", nil)}})
			return nil
		}, func(_, b string, now uint64) string {
			return fmt.Sprintf("%s is in term %d, this replica was in term %d", b, now+later, now)
		}},
	} {
		c.AwaitReady()
		leader, followers := c.Leader(), c.Followers()
		now, mark := term(c, leader), lines.mark()
		if err := way.depose(c.Replica(leader), c.Replica(followers[0]), c.Replica(followers[1]), now+later); err !=
			nil {
			t.Fatal(err)
		}
		lines.await(t, c, mark, leader+": leader -> follower: ", way.reason(followers[0], followers[1], now))
	}
	// A leader without a vote is one no more.
	c.AwaitReady()
	leader, mark := c.Leader(), lines.mark()
	if err := c.Replica(leader).Demote(); err != nil {
		t.Fatal(err)
	}
	lines.await(t, c, mark, leader+": leader -> follower: ", "removed from the voters")
}
