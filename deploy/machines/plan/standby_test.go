package plan

import (
	"errors"
	"strings"
	"testing"

	"keelson.dev/keelson/deploy/machines"
)

// settled returns a cluster of three control planes, a standby, and a worker, created by its plan.
func settled(t *testing.T) *world {
	t.Helper()
	c := aCluster(3, 1)
	c.Hosts = append(c.Hosts, machines.Host{Name: "cp4", Address: "192.0.2.14",
		Roles: []machines.Role{machines.Standby}, SSH: machines.SSH{User: "root"}})
	for i := range c.Hosts {
		c.Hosts[i].ControlPlane = machines.Settings{machines.ReplaceDead: {Text: []string{`"10m"`}}}
	}
	w := newWorld(c)
	w.carryOut(t)
	if m := w.state.Members["cp4"]; m.Voter || !m.Standby || w.voters() != 3 {
		t.Fatalf("the cluster is made as %+v", w.state.Members)
	}
	return w
}

func (w *world) carryOut(t *testing.T) string {
	t.Helper()
	steps := w.plan()
	for _, s := range steps {
		w.do(t, s)
	}
	var out strings.Builder
	Show(&out, steps)
	if left := w.plan(); len(left) > 0 {
		t.Fatalf("there is still to do: %+v", left)
	}
	return out.String()
}

// finds checks for exactly these findings, each as "ERROR cp2: what -> remedy".
func (w *world) finds(t *testing.T, when string, seen map[string]Observation, want ...string) {
	t.Helper()
	found := Inspect(w.cluster, seen, w.release, w.state)
	var is []string
	for _, f := range found {
		word := "warning"
		if f.Blocking {
			word = "ERROR"
		}
		is = append(is, word+" "+f.Machine+": "+f.What+" -> "+f.Remedy)
	}
	if len(is) != len(want) {
		t.Fatalf("%s: it finds\n%s\nwant\n%s", when, strings.Join(is, "\n"), strings.Join(want, "\n"))
	}
	for i := range is {
		if is[i] != want[i] {
			t.Errorf("%s: it finds\n%s\nwant\n%s", when, is[i], want[i])
		}
	}
}

// A standby that has got the vote of a dead replica keeps it, whatever the file says. The dead one, back with what it had, is refused with
// what to do; then it joins again as a standby, and the file needs no change. Written as it is, nothing is to be done either. F53
func TestPromotedStandbyIsLeftAlone(t *testing.T) {
	w := settled(t)
	w.finds(t, "made", w.seen())
	w.promote("cp2", "cp4")
	promoted := "warning cp4: is a standby in the file, and has the vote of cp2, which it keeps -> nothing has to be " +
		"done; give it the role controlplane to have the file say so, and cp2 the role standby"
	const back = "'kctl cluster remove cp2' takes away what it has, and 'kctl cluster up' takes it in again, as a " +
		"standby where another one has its vote"
	away := w.seen()
	away["cp2"] = Observation{Err: errors.New("reaching cp2: no route to host")}
	w.finds(t, "away", away, "ERROR cp2: reaching cp2: no route to host -> it died, and cp4 has its vote: take it out "+
		"of the file; "+back+", once it is back", promoted)
	w.finds(t, "back", w.seen(), "ERROR cp2: was replaced by cp4 while it was away, and cannot rejoin with its "+
		"data -> "+back, promoted)
	if steps := w.plan(); len(steps) > 0 {
		t.Errorf("something is done about a vote that has gone to a standby: %+v", steps)
	}
	steps, err := Remove(w.cluster, "cp2", w.facts["cp2"], w.state, false)
	if err != nil || len(steps) != 1 || steps[0].Do != Uninstall {
		t.Fatalf("it is removed by %+v, %v", steps, err)
	}
	f := emptyFacts()
	f.Addresses = []string{"192.0.2.12"}
	w.facts["cp2"] = f
	w.finds(t, "empty", w.seen(), promoted)
	said := w.carryOut(t)
	if m := w.state.Members["cp2"]; m.Voter || !m.Standby || w.voters() != 3 ||
		!strings.Contains(said, "join as a standby\n") ||
		!strings.Contains(said, "waits for a vote: its own is that of cp4 now\n") {
		t.Errorf("it joins as %+v:\n%s", m, said)
	}
	w.finds(t, "in again", w.seen(), promoted)
	// A cluster that says nothing is known by its machines.
	state, whole := w.state, w.facts["cp2"]
	w.state = State{}
	if steps := w.plan(); len(steps) > 0 {
		t.Errorf("of a cluster that says nothing: %+v", steps)
	}
	w.facts["cp2"] = emptyFacts()
	if steps := w.plan(); len(steps) != 2 || !steps[1].Standby {
		t.Errorf("of a cluster that says nothing, and a machine without anything: %+v", steps)
	}
	w.facts["cp2"], w.state = whole, state
	w.role("cp4", machines.ControlPlane)
	w.role("cp2", machines.Standby)
	w.finds(t, "written as it is", w.seen())
	if steps := w.plan(); len(steps) > 0 {
		t.Errorf("the file says what is so, and there is to do: %+v", steps)
	}
}

func (w *world) role(name string, r machines.Role) {
	for i := range w.cluster.Hosts {
		if h := &w.cluster.Hosts[i]; h.Name == name {
			h.Roles = []machines.Role{r}
		}
	}
}

// A machine that comes in the place of a dead one waits for a vote too, as long as the file says three; where it says four it has one.
func TestVotesAreAsManyAsTheFileSays(t *testing.T) {
	for _, c := range []struct {
		role    machines.Role // that the file gives to the promoted one
		standby bool
	}{{machines.Standby, true}, {machines.ControlPlane, false}} {
		w := settled(t)
		w.promote("cp2", "cp4")
		w.role("cp4", c.role)
		h := &w.cluster.Hosts[1] // cp2
		delete(w.facts, h.Name)
		h.Name, h.Address = "cp9", "192.0.2.19"
		f := emptyFacts()
		f.Addresses = []string{h.Address}
		w.facts["cp9"] = f
		w.carryOut(t)
		if m := w.state.Members["cp9"]; m.Standby != c.standby {
			t.Errorf("with cp4 a %s in the file, cp9 joins as %+v", c.role, m)
		}
	}
	// The disk of one that has got a vote is lost: it has it again.
	w := settled(t)
	w.promote("cp2", "cp4")
	f := emptyFacts()
	f.Addresses = []string{"192.0.2.14"}
	w.facts["cp4"] = f
	w.carryOut(t)
	if m := w.state.Members["cp4"]; !m.Voter {
		t.Errorf("cp4 had a vote and joins as %+v", m)
	}
}

// What is wrong with standbys of a file is said; a standby needs what a replica needs.
func TestJudgeOfStandbys(t *testing.T) {
	replaces := func(times ...string) func(*world) {
		return func(w *world) {
			for i := range w.cluster.Hosts {
				w.cluster.Hosts[i].ControlPlane = machines.Settings{
					machines.ReplaceDead: {Text: []string{times[i%len(times)]}}}
			}
		}
	}
	const name = "name a time of 30s or more under controlplane of the whole file, or leave the key out " +
		"there: it is 10m then"
	of := func(name string, change func(*machines.Facts)) func(*world) {
		return func(w *world) {
			f := w.facts[name]
			change(&f)
			w.facts[name] = f
		}
	}
	for _, c := range []struct {
		name   string
		damage func(*world)
		want   string
	}{
		{"never", replaces("0"), "warning : replace-dead-after is 0: cp4 would never get the vote of a replica that " +
			"dies -> " + name},
		{"never, as a text", replaces(`"0s"`),
			"warning : replace-dead-after is 0: cp4 would never get the vote of a replica that dies -> " + name},
		{"two times", replaces(`"1m"`, `"2m"`),
			"warning : replace-dead-after is not the same on every replica: who leads goes by its own -> " + name},
		{"never on one", replaces(`"1m"`, `"1m"`, "0"),
			"warning : replace-dead-after is not the same on every replica: who leads goes by its own -> " + name},
		{"no memory", of("cp4", func(f *machines.Facts) {
			f.Memory = 256 << 20
		}), "ERROR cp4: has 256 MiB of memory, and a replica needs 400 MiB -> give it more"},
		{"a port", of("cp4", func(f *machines.Facts) {
			f.Ports[6445], f.Active = true, nil
		}), "ERROR cp4: port 6445, which keelson-controlplane needs, is taken -> 'ss -ltnp sport = :6445' " +
			"there says by whom"},
		{"a vote by hand", func(w *world) { w.role("cp3", machines.Standby); w.role("cp4", machines.ControlPlane) },
			"warning cp3: is a standby in the file, and has a vote, which it keeps -> nothing has to " +
				"be done; give it the role controlplane to have the file say so"},
		{"taken out", func(w *world) { delete(w.state.Members, "cp4") },
			"ERROR cp4: its replica was removed from the raft cluster, and cannot rejoin with its data -> " +
				rejoinRemedy("cp4")},
		{"not yet taken in", func(w *world) {
			delete(w.state.Members, "cp4")
			of("cp4", func(f *machines.Facts) { f.Joining = true })(w)
		}, ""},
		{"a cluster that says nothing", func(w *world) { w.state = State{} }, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := settled(t)
			c.damage(w)
			var want []string
			if c.want != "" {
				want = []string{c.want}
			}
			w.finds(t, c.name, w.seen(), want...)
		})
	}
	w := settled(t)
	w.role("cp4", machines.ControlPlane) // by hand: it joined without a vote
	w.finds(t, "no vote by hand", w.seen(), "warning cp4: is a standby without a vote, and the file gives it the role "+
		"controlplane: it stays a standby -> "+
		"'kctl cluster remove cp4' takes it out of the cluster, and 'up' takes it in again, with a vote")
}

// Adding the first standby reports if the running replicas would never promote it.
func TestUnready(t *testing.T) {
	w := settled(t)
	f := w.facts["cp3"]
	f.ControlPlane = strings.Replace(f.ControlPlane, "replace-dead-after", "debug", 1)
	w.facts["cp3"] = f
	fresh := emptyFacts()
	w.facts["cp4"] = fresh
	delete(w.state.Members, "cp4")
	steps := NewPlan(w.cluster, w.facts, w.release, w.state, "cp4")
	got := MissingReplaceDead(w.cluster, w.facts, steps)
	if got == nil || got.Blocking || got.What !=
		"cp3: without replace-dead-after, and no standby gets a vote while one of these leads" || got.Remedy == "" {
		t.Errorf("it says %+v", got)
	}
	if got := MissingReplaceDead(w.cluster, w.facts, w.plan()); got != nil {
		t.Errorf("of a plan that changes cp3 too it says %+v", got)
	}
	if got := MissingReplaceDead(w.cluster, w.facts, nil); got != nil {
		t.Errorf("where nobody joins it says %+v", got)
	}
}

// A standby leaves as a replica does, and costs no majority; a reset takes it away with the control plane.
func TestStandbyLeaves(t *testing.T) {
	w := settled(t)
	steps, err := Remove(w.cluster, "cp4", w.facts["cp4"], w.state, false)
	if err != nil || len(steps) != 2 || steps[0].Do != Leave || steps[1].Do != Uninstall {
		t.Errorf("a standby leaves by %+v, %v", steps, err)
	}
	only := State{Known: true, Members: map[string]Member{"cp1": {Voter: true, Ready: "yes"},
		"cp4": {Standby: true, Ready: "yes"}}}
	if _, err := Remove(w.cluster, "cp1", w.facts["cp1"], only, false); err == nil ||
		!strings.Contains(err.Error(), "cp1 is the last replica with a vote") {
		t.Errorf("the last vote leaves: %v", err)
	}
	workers, rest := Reset(w.cluster, w.facts)
	if len(workers) != 1 || len(rest) != 4 {
		t.Errorf("reset: workers %+v, then %+v", workers, rest)
	}
}
