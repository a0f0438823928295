package provision

import (
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var rewriteMachines = flag.Bool("rewrite.machines", false, "write testdata/machines.txt and testdata/standbys.txt")

// written is what a person types and reads.
type written struct {
	*site
	strings.Builder
}

func (s *written) say(what string) { fmt.Fprintf(s, "# %s\n", what) }

func (s *written) do(verb string, args ...string) string {
	s.t.Helper()
	said, err := s.kctl(verb, args...)
	fmt.Fprintf(s, "$ kctl cluster %s\n%s",
		strings.TrimSpace(verb+" "+strings.ReplaceAll(strings.Join(args, " "), s.dir, "DIR")), said)
	if err != nil {
		fmt.Fprintf(s, "error: %v\n", strings.ReplaceAll(err.Error(), s.dir, "DIR"))
	}
	s.WriteString("\n")
	return said
}

// is wants the transcript to be that of a file.
func (s *written) is(golden string) {
	s.t.Helper()
	if *rewriteMachines {
		put(s.t, golden, s.String(), 0o644)
	}
	want, _ := os.ReadFile(golden)
	if s.String() != string(want) {
		s.t.Errorf("the output differs from %s (-rewrite.machines writes it):\n%s", golden, s.String())
	}
}

// A cluster is made of machines, changed, shown, extended, made smaller and taken away: what a person reads.
func TestClusterOfMachines(t *testing.T) {
	s := newSite(t)
	script := written{site: s}
	say, do := script.say, script.do
	hosts := []string{"cp1 192.0.2.11 controlplane", "cp2 192.0.2.12 controlplane",
		"cp3 192.0.2.13 controlplane,worker",
		`w1 192.0.2.21 worker , labels: {disk: fast}, taints: ["dedicated=db:NoSchedule"]`}
	s.write("init: {cluster-cidr: 10.1.0.0/16}\nagent: {max-pods: 60}\n", hosts...)
	before := map[string]map[string]string{}
	for name, m := range s.all {
		before[name] = m.tree(t)
	}
	say("machines with nothing on them: what would be done")
	do("up", "--dry-run")
	for name, m := range s.all {
		if !maps.Equal(before[name], m.tree(t)) {
			t.Errorf("--dry-run has changed %s", name)
		}
	}
	say("the cluster is made")
	do("up")
	after := map[string]map[string]string{}
	for name, m := range s.all {
		after[name] = m.tree(t)
	}
	say("again")
	do("up")
	for name, m := range s.all {
		if !maps.Equal(after[name], m.tree(t)) {
			t.Errorf("the second run has changed %s", name)
		}
	}
	say("settings, a label and a taint change, and somebody has stopped the agent of cp3 and changed settings of cp2")
	hosts[3] = `w1 192.0.2.21 worker , labels: {disk: slow, zone: a}, agent: {max-pods: 20}`
	s.write("init: {cluster-cidr: 10.1.0.0/16}\nagent: {max-pods: 60}\n", hosts...)
	if err := os.Remove(filepath.Join(s.all["cp3"].root, "units/keelson-agent.active")); err != nil {
		t.Fatal(err)
	}
	put(t, filepath.Join(s.all["cp2"].root, "etc/keelson/controlplane.yaml"),
		"name: cp2\nadvertise-address: 192.0.2.12\ndebug: true\n", 0o600)
	do("up", "--dry-run")
	do("up")
	say("a newer release")
	s.pack("v2")
	do("up", "--dry-run")
	do("up", "--merge")
	say("a new worker and a new control plane in the file")
	hosts = append(hosts, "w2 192.0.2.22 worker", "cp4 192.0.2.14 controlplane")
	s.write("init: {cluster-cidr: 10.1.0.0/16}\nagent: {max-pods: 60}\n", hosts...)
	do("add", "cp1")
	do("add", "w2")
	do("add")
	do("add")
	say("what is wrong with machines keeps everything from being done")
	hosts = append(hosts, "w3 192.0.2.23 worker")
	s.write("init: {cluster-cidr: 10.1.0.0/16}\nagent: {max-pods: 60}\n", hosts...)
	s.breakMachine("w3", "10.0.0.99")
	do("up")
	hosts = hosts[:len(hosts)-1]
	s.write("init: {cluster-cidr: 10.1.0.0/16}\nagent: {max-pods: 60}\n", hosts...)
	say("machines leave")
	do("remove", "w2", "--dry-run")
	do("remove", "w2")
	do("remove", "cp3")
	do("remove", "cp3")
	say("the whole of it goes")
	do("reset", "test")
	do("reset", "prod")
	for name, m := range s.all {
		if is := m.tree(t); name != "w3" && before[name] != nil && !maps.Equal(before[name], is) {
			t.Errorf("%s has more than before: %v", name, slices.Sorted(maps.Keys(is)))
		}
	}
	if left, _ := filepath.Glob(filepath.Join(s.dir, "home/.kube/keelson-*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	script.is("testdata/machines.txt")
}

// breakMachine has a machine lack what is needed.
func (s *site) breakMachine(name, address string) {
	m := s.all[name]
	bin := filepath.Join(s.dir, name+"-bin")
	put(s.t, filepath.Join(bin, "ip"), "#!/bin/sh\nprintf '2: eth0    inet "+address+
		"/24 brd x scope global eth0\\n'\n", 0o755)
	put(s.t, filepath.Join(bin, "df"), "#!/bin/sh\nprintf 'Filesystem 1024-blocks Used Available Capacity "+
		"Mounted\\n/dev/vda 1 1 204800 1%% /\\n'\n", 0o755)
	put(s.t, filepath.Join(m.root, "proc/net/tcp"),
		"  sl  local_address rem_address   st\n   0: 00000000:280A 00000000:0000 0A 0\n", 0o644)
	put(s.t, filepath.Join(m.root, "sys/fs/cgroup/cgroup.controllers"), "cpu pids\n", 0o644)
}

// shared is what the model of the cluster says.
func (s *site) cluster() (c struct {
	Calls, Made int
	Members     map[string]string
	Waiting     map[string]bool
	Nodes       map[string]struct {
		Labels map[string]string
		Looks  int
	}
	Tokens map[string]string
	Starts map[string]int
	Leader string
	Runs   map[string]string
	Done   []string
}) {
	raw, err := os.ReadFile(s.shared)
	if err == nil {
		err = json.Unmarshal(raw, &c)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

// Settings that agents refuse change nothing. Those with which they start and end cost the first one a restart, and no other anything.
func TestWrongSettingsCostAtMostOneWorker(t *testing.T) {
	s := newSite(t)
	hosts := []string{"cp1 192.0.2.11 controlplane", "w1 192.0.2.21 worker", "w2 192.0.2.22 worker",
		"w3 192.0.2.23 worker"}
	up := func(agent string) (map[string]map[string]string, string) {
		t.Helper()
		s.write("agent: {"+agent+"}\n", hosts...)
		said, err := s.kctl("up")
		trees := map[string]map[string]string{}
		for name, m := range s.all {
			trees[name] = m.tree(t)
			delete(trees[name], "/run/keelson-install.lock")
			delete(trees[name], "/run/keelson/changed")
		}
		if err != nil {
			return trees, err.Error()
		}
		return trees, "good: " + said
	}
	good, said := up("max-pods: 60")
	if !strings.HasPrefix(said, "good: ") {
		t.Fatal(said)
	}
	starts := s.cluster().Starts
	is, said := up("max-pod: 60")
	if want := `install: nothing was changed, since /etc/keelson/agent.yaml would be wrong: keelson-agent: ` +
		`/etc/keelson/agent.yaml, line 7: unknown key "max-pod": the nearest is max-pods`; !strings.HasPrefix(said,
		"change the agent: w1: ") || !strings.HasSuffix(said, want) {
		t.Errorf("%s\nwant %s", said, want)
	}
	for name := range s.all {
		if !maps.Equal(good[name], is[name]) {
			t.Errorf("%s has changed: %v", name, is[name])
		}
	}
	if is := s.cluster().Starts; !maps.Equal(is, starts) {
		t.Errorf("daemons were started: %v, want %v", is, starts)
	}
	is, said = up("max-pods: 666")
	if want := "install: keelson-agent did not start, or has ended, with its new settings: " +
		"/etc/keelson/agent.yaml is " +
		"as it was before, and it runs with that"; !strings.HasPrefix(said, "change the agent: w1: ") ||
		!strings.Contains(said, want) {
		t.Errorf("%s\nwant %s", said, want)
	}
	for name := range s.all {
		delete(is[name], "/etc/keelson/agent.yaml.before")
		if !maps.Equal(good[name], is[name]) {
			t.Errorf("%s has changed: %v", name, is[name])
		}
	}
	starts["w1 keelson-agent"] += 2
	if is := s.cluster().Starts; !maps.Equal(is, starts) {
		t.Errorf("daemons were started: %v, want %v", is, starts)
	}
	if _, said = up("max-pods: 70"); !strings.HasPrefix(said, "good: ") {
		t.Error(said)
	}
}

var everyPoint = flag.Bool("machines.everypoint", false,
	"cut 'kctl cluster up' off at every place that there is, not at some")

// What is cut off at any place of any script ends well with the next run: one cluster, all machines in it, nothing to do.
func TestClusterUpCutOff(t *testing.T) {
	hosts := []string{"cp1 192.0.2.11 controlplane", "cp2 192.0.2.12 controlplane,worker",
		"w1 192.0.2.21 worker , labels: {a: b}"}
	whole := newSite(t)
	whole.write("", hosts...)
	if said, err := whole.kctl("up"); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	want := whole.cluster()
	step := max(1, want.Calls/5)
	if *everyPoint {
		step = 1
	}
	failed := 0
	for at := want.Calls; at > 0; at -= step {
		s := newSite(t)
		s.write("", hosts...)
		put(t, s.shared+".kill", fmt.Sprint(at), 0o600)
		first, err := s.kctl("up")
		if err != nil { // what is only asked is asked again, and then it goes on
			failed++
		}
		said, err := s.kctl("up")
		if err != nil {
			t.Fatalf("cut off at %d, the next run fails: %v\n%s\nafter\n%s", at, err, said, first)
		}
		is := s.cluster()
		if !maps.Equal(is.Members, want.Members) || len(is.Nodes) != 2 || is.Nodes["w1"].Labels["a"] != "b" ||
			!slices.Equal(slices.Sorted(maps.Keys(is.Starts)), slices.Sorted(maps.Keys(want.Starts))) {
			t.Errorf("cut off at %d, the cluster is %+v, want %+v\n%s", at, is, want, said)
		}
		if said, err = s.kctl("up"); err != nil || !strings.Contains(said, "nothing to do") {
			t.Errorf("cut off at %d, the run after the next one does something (%v):\n%s", at, err, said)
		}
	}
	if failed < 3 {
		t.Errorf("%d runs failed: the test cuts nothing off", failed)
	}
}
