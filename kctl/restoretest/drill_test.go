package restoretest

import (
	"bytes"
	"strings"
	"testing"
)

func objects(of ...any) map[string]Object {
	out := map[string]Object{}
	for i := 0; i < len(of); i += 3 {
		out[of[i].(string)] = Object{Revision: uint64(of[i+1].(int)), Sum: [32]byte{of[i+2].(string)[0]}}
	}
	return out
}

func TestCompare(t *testing.T) {
	const backup = 100
	both := objects("a", 7, "x", "b", 90, "y")
	for what, c := range map[string]struct {
		Kind
		same, since int
		wrong       string // part of what is said; "" = nothing is wrong
	}{
		"nothing has changed":      {Kind: Kind{Held: 2, Restored: both, Live: both}, same: 2},
		"the cluster is not asked": {Kind: Kind{Held: 2, Restored: both}},
		"one was changed": {Kind: Kind{Held: 2, Restored: both, Live: objects("a", 7, "x", "b", 101, "z")},
			same: 1, since: 1},
		"one was made": {Kind: Kind{Held: 2, Restored: both,
			Live: objects("a", 7, "x", "b", 90, "y", "c", 102, "z")}, same: 2, since: 1},
		"one was removed": {Kind: Kind{Held: 2, Restored: both, Live: objects("a", 7, "x")},
			same: 1, since: 1},
		"all were removed": {Kind: Kind{Held: 2, Restored: both, Live: objects()}, since: 2},
		"an old one is missing": {Kind: Kind{Held: 1, Restored: objects("a", 7, "x"), Live: both}, same: 1,
			wrong: "b is in the cluster since revision 90, and not in the backup of 100"},
		"one of the very revision is": {Kind: Kind{Held: 1, Restored: objects("a", 7, "x"),
			Live: objects("a", 7, "x", "b", 100, "y")}, same: 1, wrong: "b is in the cluster since revision 100"},
		"one says something else": {Kind: Kind{Held: 2, Restored: objects("a", 7, "x", "b", 90, "z"), Live: both},
			same: 1, wrong: "b says something else"},
		"one is older than it was": {Kind: Kind{Held: 2, Restored: objects("a", 7, "x", "b", 80, "y"), Live: both},
			same: 1, wrong: "b is of revision 90 in the cluster and of 80"},
		"one is not served": {Kind: Kind{Held: 3, Restored: both},
			wrong: "holds 3 objects, and 2 are served"},
		"one too many is served": {Kind: Kind{Held: 1, Restored: both},
			wrong: "holds 1 objects, and 2 are served"},
		"one is of the future": {Kind: Kind{Held: 1, Restored: objects("a", 101, "x")},
			wrong: "a is of revision 101"},
		"one has ended by itself": {Kind: Kind{Held: 3, Expiring: 1, Restored: both, Live: both}, same: 2},
		"two have, where one may": {Kind: Kind{Held: 4, Expiring: 1, Restored: both, Live: both}, same: 2,
			wrong: "holds 4 objects"},
		"one ended there first": {Kind: Kind{Held: 2, Expiring: 1, Restored: objects("a", 7, "x"), Live: both},
			same: 1, since: 1},
		"one side could not be read": {Kind: Kind{Held: 2, Restored: both,
			Problem: "listing it in the cluster: forbidden"}, wrong: "forbidden"},
		"kinds of which there is none": {Kind: Kind{Restored: objects(), Live: objects()}},
	} {
		r := Compare(c.Kind, backup)
		if r.Same != c.same || r.Since != c.since {
			t.Errorf("%s: %d are the same and %d changed since, want %d and %d", what, r.Same, r.Since, c.same, c.since)
		}
		if said := strings.Join(r.Wrong, "; "); (said == "") != (c.wrong == "") || !strings.Contains(said, c.wrong) {
			t.Errorf("%s: wrong is %q, want %q", what, said, c.wrong)
		}
		if AllCorrect([]Row{r}) != (c.wrong == "") {
			t.Errorf("%s: the verdict is %v", what, AllCorrect([]Row{r}))
		}
	}
}

func TestManyWrong(t *testing.T) {
	live := objects()
	for _, n := range "abcdefghijkl" {
		live[string(n)] = Object{Revision: 1}
	}
	r := Compare(Kind{Name: "pods", Restored: objects(), Live: live}, 100)
	if len(r.Wrong) != maxWrongListed+1 || r.Wrong[maxWrongListed] != "and 7 more" {
		t.Errorf("%d sentences: %q", len(r.Wrong), r.Wrong)
	}
	var out bytes.Buffer
	if err := Print(&out, []Row{r, {Name: "none"}, {Name: "nodes", Held: 3, Restored: 3}}); err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.SplitAfter(`KIND    BACKUP   RESTORED   CLUSTER   SAME   SINCE   VERDICT
nodes   3        3          -         -      -       good
pods    0        0          12        0      0       WRONG
pods: a is in the cluster since revision 1, and not in the backup of 100
`, "\n") {
		if !strings.Contains(out.String(), line) {
			t.Errorf("%q is missing in:\n%s", line, out.String())
		}
	}
	if strings.Contains(out.String(), "none") {
		t.Errorf("a kind of which there is nothing has a line:\n%s", out.String())
	}
}

func TestRead(t *testing.T) {
	name, a, err := ParseItem("configmaps",
		[]byte(`{"metadata":{"namespace":"n","name":"a","resourceVersion":"12"},"data":{"k":"1"}}`))
	if name != "n/a" || a.Revision != 12 || err != nil {
		t.Fatalf("%q of %d, error %v", name, a.Revision, err)
	}
	_, same, _ := ParseItem("configmaps",
		[]byte(`{"data":{"k":"1"},"metadata":{"resourceVersion":"12","name":"a","namespace":"n"}}`))
	_, other, _ := ParseItem("configmaps",
		[]byte(`{"data":{"k":"2"},"metadata":{"resourceVersion":"12","name":"a","namespace":"n"}}`))
	if same.Sum != a.Sum || other.Sum == a.Sum {
		t.Error("the sum is not of what the object says")
	}
	heard := func(when, ready string) Object {
		_, o, err := ParseItem("nodes",
			[]byte(`{"metadata":{"name":"w1","resourceVersion":"3"},"status":{"conditions":[{"type":"Ready","status":"`+
				ready+`","lastHeartbeatTime":"`+when+`"}]}}`))
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	if heard("now", "True").Sum != heard("then", "True").Sum || heard("now", "True").Sum == heard("now", "False").Sum {
		t.Error("of a Node, when it was heard must not count, and all else must")
	}
	lease := func(namespace, renewed string) Object {
		_, o, err := ParseItem("leases.coordination.k8s.io",
			[]byte(`{"metadata":{"namespace":"`+namespace+`","name":"w1","resourceVersion":"3"},"spec":{"renewTime":"`+
				renewed+`"}}`))
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	if lease("kube-node-lease", "now").Sum != lease("kube-node-lease", "then").Sum ||
		lease("mine", "now").Sum == lease("mine", "then").Sum {
		t.Error("when it was renewed must not count of a node's Lease, and must of all others")
	}
	for _, bad := range []string{``, `[]`, `{"metadata":{"name":"a"}}`,
		`{"metadata":{"name":"a","resourceVersion":"x"}}`} {
		if _, _, err := ParseItem("pods", []byte(bad)); err == nil {
			t.Errorf("%q is taken for an object", bad)
		}
	}
}
