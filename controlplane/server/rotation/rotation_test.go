package rotation

import (
	"fmt"
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
	silent := []Member{{Name: "cp1", Held: held("new")}, {Name: "cp2", Problem: "does not answer"}}
	for _, c := range []struct {
		name    string
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
		{name: "one believes on", step: Forget, members: one(held("new", "old")), want: Forget, waits: "cp1: has not given up"},
		{name: "all have forgotten", step: Forget, members: []Member{{Name: "cp1", Held: held("new")}}, want: Done},
		{name: "it is over", step: Done, want: Done},
		{name: "it was given up", step: Aborted, want: Aborted},
	} {
		r := Record{Step: c.step, New: "new", Old: "old", Sealed: []byte("x"), Keep: 60, Until: c.until.UnixMilli(), Force: c.force}
		next, waiting := Next(r, c.members, c.users, t0)
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

// Replicas, leaders and members die, come back and join at any moment, and hear of a record late: nobody ever signs with
// a key that a living member does not believe, and in the end everybody has the new key alone. F51
func TestNobodyMeetsAnUnknownSignature(t *testing.T) {
	for seed := range uint64(2000) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		if err := live(rnd); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
}

type replica struct {
	held Held
	up   bool
	seen Record // the record as it has taken it in
}

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
	case Forget, Done:
		if r.held.Signs == rec.New {
			drop(rec.Old)
		}
	case Aborted:
		if r.held.Signs != rec.New {
			drop(rec.New)
		}
	}
}

func live(rnd *rand.Rand) error {
	all := map[string]*replica{}
	for i := range 3 {
		all[fmt.Sprint("cp", i)] = &replica{held: Held{Signs: "old", Believes: []string{"old"}}, up: true}
	}
	stored := Record{Version: Version, Kind: PeersCA, New: "new", Old: "old", Step: Trust, Sealed: []byte("x")}
	now := t0
	names := func() []string {
		var out []string
		for n := range all {
			out = append(out, n)
		}
		slices.Sort(out)
		return out
	}
	look := func() (out []Member) {
		for _, n := range names() {
			m := Member{Name: n, Held: Held{Signs: all[n].held.Signs, Believes: slices.Clone(all[n].held.Believes)}}
			if !all[n].up {
				m.Problem = "does not answer"
			}
			out = append(out, m)
		}
		return out
	}
	var seen []Member // what a leader saw, and may act upon late
	var based Record
	for i := 0; i < 3000 && stored.Active(); i++ {
		now = now.Add(time.Second)
		n := names()[rnd.IntN(len(all))]
		calm := i > 300 // faults end, so that the exchange can
		switch k := rnd.IntN(8); {
		case k == 0 && !calm:
			all[n].up = false
		case k == 1 || calm && k == 0:
			all[n].up = true
		case k == 2 && !calm && len(all) < 5: // a replica joins with what another has on its disk
			of := all[n].held
			all[fmt.Sprint("cp", len(all)+10*i)] = &replica{held: Held{Signs: of.Signs, Believes: slices.Clone(of.Believes)}, up: true}
		case k <= 4:
			if all[n].up {
				all[n].take(stored)
			}
		case k == 5:
			seen, based = look(), stored
		default:
			// A commit of a leader applies only to the record that it has seen, and only with the members it has asked.
			if seen == nil || based.Step != stored.Step || len(seen) != len(all) {
				seen = nil
				continue
			}
			stored, _ = Next(stored, seen, nil, now)
			seen = nil
		}
		for _, a := range all {
			for _, b := range all {
				if !slices.Contains(b.held.Believes, a.held.Signs) {
					return fmt.Errorf("at step %s somebody signs with %q, which another does not believe: %v", stored.Step, a.held.Signs, b.held)
				}
			}
		}
	}
	if stored.Step != Done {
		return fmt.Errorf("it came to %s only", stored.Step)
	}
	for n, r := range all {
		r.take(stored)
		if r.held.Signs != "new" || !slices.Equal(r.held.Believes, []string{"new"}) {
			return fmt.Errorf("%s has %v in the end", n, r.held)
		}
	}
	return nil
}
