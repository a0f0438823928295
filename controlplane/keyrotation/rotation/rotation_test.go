package rotation

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

var testStart = time.Date(2026, 6, 1, 0, 0, 0, 0, time.UTC)

func nextHeld(signs string, also ...string) KeyIDs {
	return KeyIDs{Signing: signs, Trusted: append(also, signs)}
}

func nextOne(h KeyIDs) []Member {
	return []Member{{Name: "cp1", Keys: nextHeld("new", "old")}, {Name: "cp2", Keys: h}}
}

func nextBoth(h KeyIDs) []Member {
	return []Member{{Name: "cp1", Keys: h}, {Name: "cp2", Problem: "another time", Keys: h}}
}

var nextSilent = []Member{{Name: "cp1", Keys: nextHeld("new")}, {Name: "cp2", Problem: "does not answer"}}

// nextCases are the cases of TestNext.
var nextCases = []struct {
	name    string
	kind    Kind
	nodes   []Node
	step    Step
	force   bool
	until   time.Time
	members []Member
	users   []string
	want    Step
	waits   string
}{
	{name: "a member does not trust the new key", step: Trust, members: nextOne(nextHeld("old")), want: Trust,
		waits: "cp2: has not received"},
	{name: "a member does not respond", step: Trust, members: nextSilent, want: Trust, waits: "cp2: does not answer"},
	{name: "a member does not respond, forced", step: Trust, force: true, members: nextSilent, want: Trust,
		waits: "cp2: does not answer"},
	{name: "no members", step: Trust, want: Trust, waits: "no member"},
	{name: "all members trust the new key", step: Trust, members: nextOne(nextHeld("old", "new")), want: Use},
	{name: "a member signs with the old key", step: Use, members: nextOne(nextHeld("old", "new")), want: Use,
		waits: "cp2: does not use"},
	{name: "a member does not respond at use", step: Use, members: nextSilent, want: Use,
		waits: "cp2: does not answer"},
	{name: "a member does not respond at use, forced", step: Use, force: true, members: nextSilent, want: Wait},
	{name: "all members sign with the new key", step: Use, members: nextOne(nextHeld("new", "old")), want: Wait},
	{name: "before the end of the wait", step: Wait, until: testStart.Add(time.Second),
		members: nextOne(nextHeld("new", "old")), want: Wait,
		waits: "until 2026-06-01"},
	{name: "before the end of the wait, forced", step: Wait, force: true, until: testStart.Add(time.Second),
		users: []string{"Secret a/b"}, want: Forget},
	{name: "the old key is in use", step: Wait, until: testStart, users: []string{"Secret a/b"}, want: Wait,
		waits: "Secret a/b"},
	{name: "the old key is not in use", step: Wait, until: testStart, want: Forget},
	{name: "a member without the new key", step: Wait, until: testStart, members: nextOne(nextHeld("old")), want: Wait,
		waits: "cp2: does not have the new key"},
	{name: "a member without the new key, forced", step: Wait, force: true, until: testStart,
		members: nextOne(nextHeld("old")), want: Forget},
	{name: "a member does not respond at wait", step: Wait, until: testStart, members: nextSilent, want: Forget},
	{name: "a member trusts the old key", step: Forget, members: nextOne(nextHeld("new", "old")), want: Forget,
		waits: "cp1: still trusts"},
	{name: "no member trusts the old key", step: Forget, members: []Member{{Name: "cp1", Keys: nextHeld("new")}},
		want: Done},
	{name: "rotation is done", step: Done, want: Done},
	{name: "a node does not trust the new CA", kind: ClusterCA, step: Trust, members: nextOne(nextHeld("old", "new")),
		nodes: []Node{{Name: "w1", Trusted: []string{"old"}}}, want: Trust, waits: "node w1: does not trust"},
	{name: "a node is away", kind: ClusterCA, step: Trust, members: nextOne(nextHeld("old", "new")),
		nodes: []Node{{Name: "w1", Problem: "it is away"}}, want: Trust, waits: "node w1: it is away"},
	{name: "a node is away, forced", kind: ClusterCA, step: Trust, force: true,
		members: nextOne(nextHeld("old", "new")), nodes: []Node{{Name: "w1", Problem: "it is away"}}, want: Use},
	{name: "a slow node is not skipped", kind: ClusterCA, step: Trust, force: true,
		members: nextOne(nextHeld("old", "new")), nodes: []Node{{Name: "w1", Trusted: []string{"old"}}}, want: Trust,
		waits: "node w1"},
	{name: "all nodes trust the new CA", kind: ClusterCA, step: Trust, members: nextOne(nextHeld("old", "new")),
		nodes: []Node{{Name: "w1", Trusted: []string{"old", "new"}, Presented: []string{"old"}}}, want: Use},
	{name: "a node has a certificate of the old CA", kind: ClusterCA, step: Wait, until: testStart,
		nodes: []Node{{Name: "w1", Presented: []string{"new", "old"}}}, want: Wait,
		waits: "node w1: still has a certificate of the previous"},
	{name: "a node is away at wait", kind: ClusterCA, step: Wait, until: testStart,
		nodes: []Node{{Name: "w1", Problem: "it is away"}}, want: Wait, waits: "node w1: it is away"},
	{name: "all nodes have certificates of the new CA", kind: ClusterCA, step: Wait, until: testStart,
		nodes: []Node{{Name: "w1", Presented: []string{"new"}}}, want: Serve},
	{name: "a member presents the old CA's certificate", kind: ClusterCA, step: Serve,
		members: []Member{{Name: "cp1", Keys: KeyIDs{Serving: "old"}}}, want: Serve, waits: "cp1: does not present"},
	{name: "all members present the new CA's certificate", kind: ClusterCA, step: Serve,
		members: []Member{{Name: "cp1", Keys: KeyIDs{Serving: "new"}}}, want: Forget},
	{name: "a node trusts the old CA", kind: ClusterCA, step: Forget,
		members: []Member{{Name: "cp1", Keys: nextHeld("new")}},
		nodes:   []Node{{Name: "w1", Trusted: []string{"new", "old"}}}, want: Forget,
		waits: "node w1: still trusts"},
	{name: "a node that is away at forget", kind: ClusterCA, step: Forget,
		members: []Member{{Name: "cp1", Keys: nextHeld("new")}}, nodes: []Node{{Name: "w1", Problem: "it is away"}},
		want: Done},
	{name: "rotation is aborted", step: Aborted, want: Aborted},
	{name: "unrelated rotation at trust", step: Trust, members: nextBoth(nextHeld("c")), want: Aborted},
	{name: "unrelated rotation at use", step: Use, force: true, members: nextBoth(nextHeld("c")), want: Aborted},
	{name: "unrelated rotation at wait", kind: ClusterCA, step: Wait, until: testStart.Add(time.Hour),
		members: nextBoth(nextHeld("c", "new")), want: Aborted},
	{name: "unrelated rotation at forget", step: Forget, members: nextBoth(nextHeld("c")), want: Aborted},
	{name: "the rotation is unrelated to one member", step: Use, members: nextOne(nextHeld("c")), want: Use,
		waits: "cp2: does not use"},
	{name: "unrelated rotation, and a member does not respond", step: Wait, until: testStart.Add(time.Hour),
		members: append(nextBoth(nextHeld("c")), nextSilent[1]), want: Wait, waits: "until"},
	{name: "unrelated rotation is done", step: Done, members: nextBoth(nextHeld("c")), want: Done},
}

func TestNext(t *testing.T) {

	for _, c := range nextCases {
		r := Record{Kind: c.kind, Step: c.step, New: "new", Old: "old", Sealed: []byte("x"), Keep: 60,
			Until: c.until.UnixMilli(), Force: c.force}
		next, waiting := Next(r, ClusterState{Members: c.members, Nodes: c.nodes, Users: c.users}, testStart)
		text := strings.Join(waiting, "; ")
		if next.Step != c.want || (c.waits == "") != (text == "") || !strings.Contains(text, c.waits) {
			t.Errorf("%s: %s, waiting for %q", c.name, next.Step, text)
		}
		if c.step == Use && next.Step == Wait &&
			(next.Sealed != nil || next.Until != testStart.Add(time.Minute).UnixMilli()) {
			t.Errorf("%s: %+v", c.name, next)
		}
	}
}

func TestCheckStartAndAbort(t *testing.T) {
	ok := []Member{{Name: "cp1", Keys: KeyIDs{Signing: "a"}}, {Name: "cp2", Keys: KeyIDs{Signing: "a"}}}
	if old, err := CheckStart(Record{Step: Done}, ok); err != nil || old != "a" {
		t.Error(old, err)
	}
	for want, c := range map[string]struct {
		now     Record
		members []Member
	}{
		"only one rotation can run": {Record{Kind: PeersCA, Step: Wait}, ok},
		"cp2: does not answer":      {Record{}, []Member{ok[0], {Name: "cp2", Problem: "does not answer"}}},
		"cp2 with b":                {Record{}, []Member{ok[0], {Name: "cp2", Keys: KeyIDs{Signing: "b"}}}},
		"no member is known":        {Record{}, nil},
		"do not sign with the same ": {Record{Step: Aborted},
			[]Member{ok[0], {Name: "cp2", Keys: KeyIDs{Signing: "b"}}}},
	} {
		if _, err := CheckStart(c.now, c.members); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", want, err)
		}
	}
	for step, ok := range map[Step]bool{Trust: true, Use: false, Wait: false, Forget: false, Done: false,
		Aborted: false, "": false} {
		r, err := Abort(Record{Step: step, Sealed: []byte("x")}, testStart)
		if (err == nil) != ok || ok && (r.Step != Aborted || r.Sealed != nil) {
			t.Errorf("abort at %q: %+v, %v", step, r, err)
		}
	}
}

// Replicas, leaders and nodes fail, return and join at any time, and receive records late. Every
// running member trusts every key that another member signs with. For the cluster CA this holds for
// nodes too, which may be away for any time. No certificate of a CA that is no longer trusted is
// presented. In the end every member has the new key only. F51
func TestNoUntrustedSignature(t *testing.T) {
	for kind, plans := range map[Kind]uint64{PeersCA: 2000, ClusterCA: 1000} {
		for seed := range plans {
			w := newSimulation(rand.New(rand.NewPCG(seed, 1)), kind)
			if err := w.runToEnd(); err != nil {
				t.Fatalf("%s, seed %d: %v", kind, seed, err)
			}
		}
	}
}

type simReplica struct {
	held KeyIDs
	up   bool
	seen Record // the last record that it has applied
}

func (h KeyIDs) cloneKeys() KeyIDs { return KeyIDs{h.Signing, slices.Clone(h.Trusted), h.Serving} }

// applyRecord applies a record to the keys of a replica, as keyrotation/follow.go does on disk.
func (r *simReplica) applyRecord(rec Record) {
	r.seen = rec
	believe := func(id string) {
		if !slices.Contains(r.held.Trusted, id) {
			r.held.Trusted = append(r.held.Trusted, id)
		}
	}
	drop := func(id string) {
		r.held.Trusted = slices.DeleteFunc(r.held.Trusted, func(b string) bool { return b == id })
	}
	switch rec.Step {
	case Trust:
		believe(rec.New)
	case Use, Wait:
		if r.held.Signing != rec.New && rec.Sealed != nil {
			believe(rec.New)
			r.held.Signing = rec.New
		}
	case Serve:
		r.held.Serving = r.held.Signing
	case Forget, Done:
		if r.held.Signing == rec.New {
			r.held.Serving = rec.New
			drop(rec.Old)
		}
	case Aborted:
		if r.held.Signing != rec.New {
			drop(rec.New)
		}
	}
}

// simNode is a node with its trusted CAs and its certificate.
type simNode struct {
	believes []string
	since    int64
	shows    string
	up       bool
	at       string         // the replica with its session
	coming   []trustMessage // messages of that replica that have not arrived
}

// trustMessage is the message in which a replica sends its trusted CAs to a node.
type trustMessage struct {
	held  KeyIDs
	since int64
}

// currentMessage returns the message that the replica sends at this time.
func (r *simReplica) currentMessage() trustMessage {
	return trustMessage{r.held.cloneKeys(), r.seen.TrustOrder}
}

// applyMessage applies a message as agent/session/believed.go does, and renews the certificate.
func (a *simNode) applyMessage(t trustMessage) {
	if t.since < a.since {
		return
	}
	a.believes, a.since, a.shows = t.held.Trusted, t.since, t.held.Signing
}

type simulation struct {
	rnd    *rand.Rand
	all    map[string]*simReplica
	nodes  map[string]*simNode
	stored Record
	now    time.Time
	seen   *ClusterState // the state that a leader has observed; it may be committed late
	based  Record
}

func newSimulation(rnd *rand.Rand, kind Kind) *simulation {
	w := &simulation{rnd: rnd, all: map[string]*simReplica{}, nodes: map[string]*simNode{}, now: testStart}
	for i := range 3 {
		w.all[fmt.Sprint("cp", i)] = &simReplica{held: KeyIDs{Signing: "old", Trusted: []string{"old"}, Serving: "old"},
			up: true}
	}
	if kind == ClusterCA {
		for i := range 3 {
			w.nodes[fmt.Sprint("w", i)] = &simNode{believes: []string{"old"}, shows: "old", up: true}
		}
	}
	w.stored = Record{Version: Version, Kind: kind, New: "new", Old: "old", Step: Trust,
		Sealed: []byte("x"), TrustOrder: 1}
	return w
}

func sortedKeys[T any](of map[string]T) []string { return slices.Sorted(maps.Keys(of)) }

// observe returns the state that a leader observes. Nodes without a session have a problem.
func (w *simulation) observe() *ClusterState {
	out := &ClusterState{}
	for _, n := range sortedKeys(w.all) {
		m := Member{Name: n, Keys: w.all[n].held.cloneKeys()}
		if !w.all[n].up {
			m.Problem = "does not answer"
		}
		out.Members = append(out.Members, m)
	}
	for _, n := range sortedKeys(w.nodes) {
		a := w.nodes[n]
		node := Node{Name: n, Trusted: slices.Clone(a.believes), Presented: []string{a.shows}}
		if r := w.all[a.at]; !a.up || r == nil || !r.up {
			node.Problem = "it is away"
		}
		out.Nodes = append(out.Nodes, node)
	}
	return out
}

func (w *simulation) runToEnd() error {
	for i := 0; i < 6000 && w.stored.Active(); i++ {
		w.now = w.now.Add(time.Second)
		w.runRandomEvent(i, i > 300) // faults end, so that the rotation can finish
		if err := w.checkInvariants(); err != nil {
			return err
		}
	}
	if w.stored.Step != Done {
		return fmt.Errorf("the rotation stopped at %s", w.stored.Step)
	}
	for n, r := range w.all {
		r.applyRecord(w.stored)
		if r.held.Signing != "new" || !slices.Equal(r.held.Trusted, []string{"new"}) ||
			r.held.Serving != "new" && w.stored.Kind == ClusterCA {
			return fmt.Errorf("%s ends with %v", n, r.held)
		}
	}
	for n, a := range w.nodes {
		a.applyMessage(w.all["cp0"].currentMessage())
		if a.shows != "new" || !slices.Equal(a.believes, []string{"new"}) {
			return fmt.Errorf("node %s ends with %+v", n, a)
		}
	}
	return nil
}

// runRandomEvent runs one random event. With calm, no faults occur.
func (w *simulation) runRandomEvent(i int, calm bool) {
	r := w.all[sortedKeys(w.all)[w.rnd.IntN(len(w.all))]]
	switch k := w.rnd.IntN(12); {
	case k == 0 && !calm:
		r.up = false
	case k == 1 || calm && k == 0:
		r.up = true
	case k == 2 && !calm && len(w.all) < 5: // a replica joins with the keys of another replica
		w.all[fmt.Sprint("cp", len(w.all)+10*i)] = &simReplica{held: r.held.cloneKeys(), seen: r.seen, up: true}
	case k <= 4:
		if r.up {
			r.applyRecord(w.stored)
		}
	case k == 5:
		w.seen, w.based = w.observe(), w.stored
	case k <= 9 && len(w.nodes) > 0:
		w.runNodeEvent(i, k, calm)
	default:
		// A commit applies only to the record that the leader has read, and only if all members
		// have reported.
		if w.seen == nil || w.based.Step != w.stored.Step || len(w.seen.Members) != len(w.all) {
			w.seen = nil
			return
		}
		w.stored, _ = Next(w.stored, *w.seen, w.now)
		w.seen = nil
	}
}

// runNodeEvent runs one random event of a node: it goes away, returns, receives a message, moves to
// another replica, which may have an older record, or joins.
func (w *simulation) runNodeEvent(i, k int, calm bool) {
	at := sortedKeys(w.all)[w.rnd.IntN(len(w.all))]
	a := w.nodes[sortedKeys(w.nodes)[w.rnd.IntN(len(w.nodes))]]
	switch {
	case k == 6 && !calm:
		a.up, a.at, a.coming = false, "", nil
	case k == 7 && !calm && len(w.nodes) < 6 && w.all[at].up:
		w.nodes[fmt.Sprint("w", len(w.nodes)+10*i)] = &simNode{believes: slices.Clone(w.all[at].held.Trusted),
			shows: w.all[at].held.Signing, up: true}
	case k == 8 || calm && k == 6:
		a.up, a.at, a.coming = true, at, []trustMessage{w.all[at].currentMessage()}
	}
	if r := w.all[a.at]; a.up && r != nil && r.up {
		if len(a.coming) > 0 {
			a.applyMessage(a.coming[0])
			a.coming = a.coming[1:]
		}
		a.coming = append(a.coming, r.currentMessage())
	}
}

func (w *simulation) checkInvariants() error {
	for _, a := range w.all {
		for _, b := range w.all {
			for _, id := range []string{a.held.Signing, a.held.Serving} {
				if !slices.Contains(b.held.Trusted, id) && (w.stored.Kind == ClusterCA || id == a.held.Signing) {
					return fmt.Errorf("at step %s somebody shows a certificate by %q, which another does not "+
						"believe: %v", w.stored.Step, id, b.held)
				}
			}
		}
		for name, n := range w.nodes {
			if !slices.Contains(n.believes, a.held.Signing) {
				return fmt.Errorf("at step %s node %s receives a signature of %q and trusts %v", w.stored.Step, name,
					a.held.Signing, n.believes)
			}
			if !slices.Contains(a.held.Trusted, n.shows) {
				return fmt.Errorf("at step %s node %s presents %q to a replica that trusts %v",
					w.stored.Step, name, n.shows,
					a.held.Trusted)
			}
		}
	}
	return nil
}

// A rotation waits for users of the old CA while their certificates are valid and in use. The
// record has a bounded number of users and is updated at bounded intervals. F51
func TestUsersOfTheOldCA(t *testing.T) {
	at := func(d time.Duration) int64 { return testStart.Add(d).UnixMilli() }
	r := Record{Kind: ClusterCA, Step: Wait, Keep: 3600}
	ann := User{Name: "ann", Expires: at(100 * time.Hour), LastUsed: at(0)}
	r, changed := r.AddUsers(map[string]User{"1": ann,
		"2": {Name: "bob", Expires: at(10 * time.Minute), LastUsed: at(0)}})
	if !changed || len(r.UsersOfOldCA(testStart)) != 2 || r.UsersOfOldCA(testStart)[0].Name != "bob" {
		t.Errorf("%v %+v", changed, r)
	}
	ann.LastUsed = at(7 * time.Minute)
	if _, changed := r.AddUsers(map[string]User{"1": ann}); changed {
		t.Error("the record changed seven minutes after the last use")
	}
	ann.LastUsed = at(8 * time.Minute)
	next, changed := r.AddUsers(map[string]User{"1": ann})
	if !changed || r.Users["1"].LastUsed != at(0) {
		t.Errorf("changed %v; the previous record has %v", changed, r.Users)
	}
	for after, want := range map[time.Duration]int{11 * time.Minute: 1, time.Hour: 1, 68 * time.Minute: 0} {
		if got := next.UsersOfOldCA(testStart.Add(after)); len(got) != want {
			t.Errorf("users after %s: %v", after, got)
		}
	}
	many := map[string]User{}
	for i := range 2 * maxUsers {
		many[fmt.Sprint("n", i)] = User{Expires: at(time.Hour), LastUsed: at(0)}
	}
	if next, _ = next.AddUsers(many); len(next.Users) != maxUsers {
		t.Errorf("the record has %d users", len(next.Users))
	}
}
