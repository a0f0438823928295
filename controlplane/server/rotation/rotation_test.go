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

var t0 = time.Date(2026, 6, 1, 0, 0, 0, 0, time.UTC)

func TestNext(t *testing.T) {
	held := func(signs string, also ...string) Held { return Held{Signs: signs, Believes: append(also, signs)} }
	one := func(h Held) []Member {
		return []Member{{Name: "cp1", Held: held("new", "old")}, {Name: "cp2", Held: h}}
	}
	both := func(h Held) []Member {
		return []Member{{Name: "cp1", Held: h}, {Name: "cp2", Problem: "another time", Held: h}}
	}
	silent := []Member{{Name: "cp1", Held: held("new")}, {Name: "cp2", Problem: "does not answer"}}
	for _, c := range []struct {
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
		{name: "one does not believe", step: Trust, members: one(held("old")), want: Trust, waits: "cp2: has not taken"},
		{name: "one is silent", step: Trust, members: silent, want: Trust, waits: "cp2: does not answer"},
		{name: "one is silent and it is forced", step: Trust, force: true, members: silent, want: Trust, waits: "cp2: does not answer"},
		{name: "nobody is known", step: Trust, want: Trust, waits: "no member"},
		{name: "all believe", step: Trust, members: one(held("old", "new")), want: Use},
		{name: "one still signs with the former", step: Use, members: one(held("old", "new")), want: Use, waits: "cp2: does not use"},
		{name: "one is silent at use", step: Use, members: silent, want: Use, waits: "cp2: does not answer"},
		{name: "one is silent at use and left out", step: Use, force: true, members: silent, want: Wait},
		{name: "all sign", step: Use, members: one(held("new", "old")), want: Wait},
		{name: "too early", step: Wait, until: t0.Add(time.Second), members: one(held("new", "old")), want: Wait, waits: "until 2026-06-01"},
		{name: "early and forced", step: Wait, force: true, until: t0.Add(time.Second), users: []string{"Secret a/b"}, want: Forget},
		{name: "somebody uses it", step: Wait, until: t0, users: []string{"Secret a/b"}, want: Wait, waits: "Secret a/b"},
		{name: "nobody uses it", step: Wait, until: t0, want: Forget},
		{name: "one became a member too late", step: Wait, until: t0, members: one(held("old")), want: Wait, waits: "cp2: has not got the new key"},
		{name: "one became a member too late and it is forced", step: Wait, force: true, until: t0, members: one(held("old")), want: Forget},
		{name: "one is away at wait", step: Wait, until: t0, members: silent, want: Forget},
		{name: "one believes on", step: Forget, members: one(held("new", "old")), want: Forget, waits: "cp1: has not given up"},
		{name: "all have forgotten", step: Forget, members: []Member{{Name: "cp1", Held: held("new")}}, want: Done},
		{name: "it is over", step: Done, want: Done},
		{name: "a node does not believe", kind: ClusterCA, step: Trust, members: one(held("old", "new")), nodes: []Node{{Name: "w1", Believes: []string{"old"}}}, want: Trust, waits: "node w1: does not believe"},
		{name: "a node is away", kind: ClusterCA, step: Trust, members: one(held("old", "new")), nodes: []Node{{Name: "w1", Problem: "it is away"}}, want: Trust, waits: "node w1: it is away"},
		{name: "a node is away and left out", kind: ClusterCA, step: Trust, force: true, members: one(held("old", "new")), nodes: []Node{{Name: "w1", Problem: "it is away"}}, want: Use},
		{name: "a node that is slow is not left out", kind: ClusterCA, step: Trust, force: true, members: one(held("old", "new")), nodes: []Node{{Name: "w1", Believes: []string{"old"}}}, want: Trust, waits: "node w1"},
		{name: "all nodes believe", kind: ClusterCA, step: Trust, members: one(held("old", "new")), nodes: []Node{{Name: "w1", Believes: []string{"old", "new"}, Shows: []string{"old"}}}, want: Use},
		{name: "a node shows the former", kind: ClusterCA, step: Wait, until: t0, nodes: []Node{{Name: "w1", Shows: []string{"new", "old"}}}, want: Wait, waits: "node w1: has a certificate by the former"},
		{name: "a node is away at wait", kind: ClusterCA, step: Wait, until: t0, nodes: []Node{{Name: "w1", Problem: "it is away"}}, want: Wait, waits: "node w1: it is away"},
		{name: "all nodes show the new one", kind: ClusterCA, step: Wait, until: t0, nodes: []Node{{Name: "w1", Shows: []string{"new"}}}, want: Serve},
		{name: "one shows the former at the API", kind: ClusterCA, step: Serve, members: []Member{{Name: "cp1", Held: Held{Serves: "old"}}}, want: Serve, waits: "cp1: does not show"},
		{name: "all show the new one at the API", kind: ClusterCA, step: Serve, members: []Member{{Name: "cp1", Held: Held{Serves: "new"}}}, want: Forget},
		{name: "a node believes the former on", kind: ClusterCA, step: Forget, members: []Member{{Name: "cp1", Held: held("new")}}, nodes: []Node{{Name: "w1", Believes: []string{"new", "old"}}}, want: Forget, waits: "node w1: has not given up"},
		{name: "a node that is away hears of it later", kind: ClusterCA, step: Forget, members: []Member{{Name: "cp1", Held: held("new")}}, nodes: []Node{{Name: "w1", Problem: "it is away"}}, want: Done},
		{name: "it was given up", step: Aborted, want: Aborted},
		{name: "of another time, at trust", step: Trust, members: both(held("c")), want: Aborted},
		{name: "of another time, at use", step: Use, force: true, members: both(held("c")), want: Aborted},
		{name: "of another time, at wait", kind: ClusterCA, step: Wait, until: t0.Add(time.Hour), members: both(held("c", "new")), want: Aborted},
		{name: "of another time, at forget", step: Forget, members: both(held("c")), want: Aborted},
		{name: "one member alone is of another time", step: Use, members: one(held("c")), want: Use, waits: "cp2: does not use"},
		{name: "of another time, and one is silent", step: Wait, until: t0.Add(time.Hour), members: append(both(held("c")), silent[1]), want: Wait, waits: "until"},
		{name: "it was over in another time", step: Done, members: both(held("c")), want: Done},
	} {
		r := Record{Kind: c.kind, Step: c.step, New: "new", Old: "old", Sealed: []byte("x"), Keep: 60, Until: c.until.UnixMilli(), Force: c.force}
		next, waiting := Next(r, Seen{Members: c.members, Nodes: c.nodes, Users: c.users}, t0)
		text := strings.Join(waiting, "; ")
		if next.Step != c.want || (c.waits == "") != (text == "") || !strings.Contains(text, c.waits) {
			t.Errorf("%s: %s, waiting for %q", c.name, next.Step, text)
		}
		if c.step == Use && next.Step == Wait && (next.Sealed != nil || next.Until != t0.Add(time.Minute).UnixMilli()) {
			t.Errorf("%s: %+v", c.name, next)
		}
	}
}

func TestBeginAndAbort(t *testing.T) {
	ok := []Member{{Name: "cp1", Held: Held{Signs: "a"}}, {Name: "cp2", Held: Held{Signs: "a"}}}
	if old, err := Begin(Record{Step: Done}, ok); err != nil || old != "a" {
		t.Error(old, err)
	}
	for want, c := range map[string]struct {
		now     Record
		members []Member
	}{
		"only one at a time":    {Record{Kind: PeersCA, Step: Wait}, ok},
		"cp2: does not answer":  {Record{}, []Member{ok[0], {Name: "cp2", Problem: "does not answer"}}},
		"cp2 with b":            {Record{}, []Member{ok[0], {Name: "cp2", Held: Held{Signs: "b"}}}},
		"no member is known":    {Record{}, nil},
		"do not sign with one ": {Record{Step: Aborted}, []Member{ok[0], {Name: "cp2", Held: Held{Signs: "b"}}}},
	} {
		if _, err := Begin(c.now, c.members); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", want, err)
		}
	}
	for step, ok := range map[Step]bool{Trust: true, Use: false, Wait: false, Forget: false, Done: false, Aborted: false, "": false} {
		r, err := Abort(Record{Step: step, Sealed: []byte("x")}, t0)
		if (err == nil) != ok || ok && (r.Step != Aborted || r.Sealed != nil) {
			t.Errorf("abort at %q: %+v, %v", step, r, err)
		}
	}
}

// Replicas, leaders, members and nodes die, come back and join at any moment, and hear of a record late: nobody ever signs
// with a key that a living member does not believe, of the cluster's CA no node either, which may be away as long as it
// likes; nobody shows a certificate that is believed no more; and in the end everybody has the new key alone. F51
func TestNobodyMeetsAnUnknownSignature(t *testing.T) {
	for kind, plans := range map[Kind]uint64{PeersCA: 2000, ClusterCA: 1000} {
		for seed := range plans {
			w := newWorld(rand.New(rand.NewPCG(seed, 1)), kind)
			if err := w.live(); err != nil {
				t.Fatalf("%s, seed %d: %v", kind, seed, err)
			}
		}
	}
}

type replica struct {
	held Held
	up   bool
	seen Record // the record as it has taken it in
}

func (h Held) clone() Held { return Held{h.Signs, slices.Clone(h.Believes), h.Serves} }

// take does on the disk of a replica what server/keys.go does.
func (r *replica) take(rec Record) {
	r.seen = rec
	believe := func(id string) {
		if !slices.Contains(r.held.Believes, id) {
			r.held.Believes = append(r.held.Believes, id)
		}
	}
	drop := func(id string) {
		r.held.Believes = slices.DeleteFunc(r.held.Believes, func(b string) bool { return b == id })
	}
	switch rec.Step {
	case Trust:
		believe(rec.New)
	case Use, Wait:
		if r.held.Signs != rec.New && rec.Sealed != nil {
			believe(rec.New)
			r.held.Signs = rec.New
		}
	case Serve:
		r.held.Serves = r.held.Signs
	case Forget, Done:
		if r.held.Signs == rec.New {
			r.held.Serves = rec.New
			drop(rec.Old)
		}
	case Aborted:
		if r.held.Signs != rec.New {
			drop(rec.New)
		}
	}
}

// agent is a node with its certificate.
type agent struct {
	believes []string
	since    int64
	shows    string
	up       bool
	at       string // the replica that has its session
	coming   []told // what that has sent and is on its way
}

// told is what a replica says to a node.
type told struct {
	held  Held
	since int64
}

// tells is what a replica says at a time.
func (r *replica) tells() told { return told{r.held.clone(), r.seen.Believed} }

// hear does what agent/session/believed.go does with what a replica says, and renews when it is told to.
func (a *agent) hear(t told) {
	if t.since < a.since {
		return
	}
	a.believes, a.since, a.shows = t.held.Believes, t.since, t.held.Signs
}

type world struct {
	rnd    *rand.Rand
	all    map[string]*replica
	nodes  map[string]*agent
	stored Record
	now    time.Time
	seen   *Seen // what a leader saw, and may act upon late
	based  Record
}

func newWorld(rnd *rand.Rand, kind Kind) *world {
	w := &world{rnd: rnd, all: map[string]*replica{}, nodes: map[string]*agent{}, now: t0}
	for i := range 3 {
		w.all[fmt.Sprint("cp", i)] = &replica{held: Held{Signs: "old", Believes: []string{"old"}, Serves: "old"}, up: true}
	}
	if kind == ClusterCA {
		for i := range 3 {
			w.nodes[fmt.Sprint("w", i)] = &agent{believes: []string{"old"}, shows: "old", up: true}
		}
	}
	w.stored = Record{Version: Version, Kind: kind, New: "new", Old: "old", Step: Trust, Sealed: []byte("x"), Believed: 1}
	return w
}

func sorted[T any](of map[string]T) []string { return slices.Sorted(maps.Keys(of)) }

// look is what a leader sees: of every node that has a session what it is, of others that they are away.
func (w *world) look() *Seen {
	out := &Seen{}
	for _, n := range sorted(w.all) {
		m := Member{Name: n, Held: w.all[n].held.clone()}
		if !w.all[n].up {
			m.Problem = "does not answer"
		}
		out.Members = append(out.Members, m)
	}
	for _, n := range sorted(w.nodes) {
		a := w.nodes[n]
		node := Node{Name: n, Believes: slices.Clone(a.believes), Shows: []string{a.shows}}
		if r := w.all[a.at]; !a.up || r == nil || !r.up {
			node.Problem = "it is away"
		}
		out.Nodes = append(out.Nodes, node)
	}
	return out
}

func (w *world) live() error {
	for i := 0; i < 6000 && w.stored.Active(); i++ {
		w.now = w.now.Add(time.Second)
		w.happens(i, i > 300) // faults end, so that the exchange can
		if err := w.check(); err != nil {
			return err
		}
	}
	if w.stored.Step != Done {
		return fmt.Errorf("it came to %s only", w.stored.Step)
	}
	for n, r := range w.all {
		r.take(w.stored)
		if r.held.Signs != "new" || !slices.Equal(r.held.Believes, []string{"new"}) || r.held.Serves != "new" && w.stored.Kind == ClusterCA {
			return fmt.Errorf("%s has %v in the end", n, r.held)
		}
	}
	for n, a := range w.nodes {
		a.hear(w.all["cp0"].tells())
		if a.shows != "new" || !slices.Equal(a.believes, []string{"new"}) {
			return fmt.Errorf("node %s has %+v in the end", n, a)
		}
	}
	return nil
}

// happens is one thing out of those that may.
func (w *world) happens(i int, calm bool) {
	r := w.all[sorted(w.all)[w.rnd.IntN(len(w.all))]]
	switch k := w.rnd.IntN(12); {
	case k == 0 && !calm:
		r.up = false
	case k == 1 || calm && k == 0:
		r.up = true
	case k == 2 && !calm && len(w.all) < 5: // a replica joins with what another has on its disk
		w.all[fmt.Sprint("cp", len(w.all)+10*i)] = &replica{held: r.held.clone(), seen: r.seen, up: true}
	case k <= 4:
		if r.up {
			r.take(w.stored)
		}
	case k == 5:
		w.seen, w.based = w.look(), w.stored
	case k <= 9 && len(w.nodes) > 0:
		w.toNode(i, k, calm)
	default:
		// A commit of a leader applies only to the record that it has seen, and only with the members it has asked.
		if w.seen == nil || w.based.Step != w.stored.Step || len(w.seen.Members) != len(w.all) {
			w.seen = nil
			return
		}
		w.stored, _ = Next(w.stored, *w.seen, w.now)
		w.seen = nil
	}
}

// toNode is what happens to a node: it goes away, comes back, hears of the replica that has its session, moves to another
// one, which may be behind, or is new.
func (w *world) toNode(i, k int, calm bool) {
	at := sorted(w.all)[w.rnd.IntN(len(w.all))]
	a := w.nodes[sorted(w.nodes)[w.rnd.IntN(len(w.nodes))]]
	switch {
	case k == 6 && !calm:
		a.up, a.at, a.coming = false, "", nil
	case k == 7 && !calm && len(w.nodes) < 6 && w.all[at].up:
		w.nodes[fmt.Sprint("w", len(w.nodes)+10*i)] = &agent{believes: slices.Clone(w.all[at].held.Believes), shows: w.all[at].held.Signs, up: true}
	case k == 8 || calm && k == 6:
		a.up, a.at, a.coming = true, at, []told{w.all[at].tells()}
	}
	if r := w.all[a.at]; a.up && r != nil && r.up {
		if len(a.coming) > 0 {
			a.hear(a.coming[0])
			a.coming = a.coming[1:]
		}
		a.coming = append(a.coming, r.tells())
	}
}

func (w *world) check() error {
	for _, a := range w.all {
		for _, b := range w.all {
			for _, id := range []string{a.held.Signs, a.held.Serves} {
				if !slices.Contains(b.held.Believes, id) && (w.stored.Kind == ClusterCA || id == a.held.Signs) {
					return fmt.Errorf("at step %s somebody shows a certificate by %q, which another does not believe: %v", w.stored.Step, id, b.held)
				}
			}
		}
		for name, n := range w.nodes {
			if !slices.Contains(n.believes, a.held.Signs) {
				return fmt.Errorf("at step %s node %s meets %q and believes %v", w.stored.Step, name, a.held.Signs, n.believes)
			}
			if !slices.Contains(a.held.Believes, n.shows) {
				return fmt.Errorf("at step %s node %s shows %q where %v are believed", w.stored.Step, name, n.shows, a.held.Believes)
			}
		}
	}
	return nil
}

// Users of the former CA are waited for while they use it and their certificates are good. What is written for that is
// bounded in number and in how often. F51
func TestUsersOfTheFormerCA(t *testing.T) {
	at := func(d time.Duration) int64 { return t0.Add(d).UnixMilli() }
	r := Record{Kind: ClusterCA, Step: Wait, Keep: 3600}
	ann := User{Name: "ann", Ends: at(100 * time.Hour), Seen: at(0)}
	r, changed := r.Note(map[string]User{"1": ann, "2": {Name: "bob", Ends: at(10 * time.Minute), Seen: at(0)}})
	if !changed || len(r.UsersOfFormer(t0)) != 2 || r.UsersOfFormer(t0)[0].Name != "bob" {
		t.Errorf("%v %+v", changed, r)
	}
	ann.Seen = at(7 * time.Minute)
	if _, changed := r.Note(map[string]User{"1": ann}); changed {
		t.Error("it is written again after seven minutes of an hour")
	}
	ann.Seen = at(8 * time.Minute)
	next, changed := r.Note(map[string]User{"1": ann})
	if !changed || r.Users["1"].Seen != at(0) {
		t.Errorf("%v; the record before has %v", changed, r.Users)
	}
	for after, want := range map[time.Duration]int{11 * time.Minute: 1, time.Hour: 1, 68 * time.Minute: 0} {
		if got := next.UsersOfFormer(t0.Add(after)); len(got) != want {
			t.Errorf("after %s there are %v", after, got)
		}
	}
	many := map[string]User{}
	for i := range 2 * maxUsers {
		many[fmt.Sprint("n", i)] = User{Ends: at(time.Hour), Seen: at(0)}
	}
	if next, _ = next.Note(many); len(next.Users) != maxUsers {
		t.Errorf("%d users are noted", len(next.Users))
	}
}
